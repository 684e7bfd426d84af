"""The engine penalised tokens that the context holds already; training's probabilities know no penalty.

A penalty takes probability from tokens seen before and gives it to all others: training finds the former more probable
than the engine did, and the latter less, each without exception but for noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from slime_instrument._analysis.evidence import Estimate, Finding, View
from slime_instrument._analysis.findings import temperature
from slime_instrument._analysis.groups import groups
from slime_instrument._analysis.history import History, history_of
from slime_instrument._analysis.moments import Ratio, mean_of

CODE = "sampling-penalty"
ORDER = 80
_SURE = 5.0  # standard errors
_SMALLEST = 0.05  # nats of shift worth a name
_NEW_LOSE = 0.5  # gain over loss among new tokens, at most
_SEEN_GAIN = 2.0  # and among seen ones, at least
_BINS = (-8.0, -5.0, -3.5, -2.5, -1.5, -0.8, -0.3, -0.05)  # of log μ; tokens are compared within them
_LARGEST = 5.0


@dataclass(frozen=True)
class _Fit:
    where: str
    shift: Ratio
    n: int
    new: float
    seen: float


def find(view: View) -> Finding | None:
    for group in groups(view):
        if float(group.moments.total("size")) < _SMALLEST * 0.1 * group.moments.total("n"):
            continue
        if temperature.fit_of(view, group) is not None:
            continue
        history = history_of(view, group.pairs)
        fits = [fit for fit in _fits(history) if _is_penalty(fit)] if history is not None else []
        if not fits:
            continue
        fit = max(fits, key=lambda one: one.shift.t)
        n, value, reach = fit.n, fit.shift.value, 2 * fit.shift.error
        message = (
            f"In {int(group.pairs.sum())} samples the engine's probabilities of tokens that {fit.where} held already are "
            f"too small by {value:.3g} nats ({value - reach:.3g} to {value + reach:.3g}), those of new tokens too large. "
            "The engine sampled with a repetition, presence or frequency penalty; training knows none. Switch it off, or "
            "expect these ratios."
        )
        evidence = {"shift": value, "seen_in": fit.where, "gain_over_loss_new": fit.new, "gain_over_loss_seen": fit.seen}
        needed = max(2, min(n, math.ceil(n * (_SURE / fit.shift.t) ** 2)))
        looks = ("a logit bias against frequent tokens", "n-gram blocking")
        estimate = Estimate("penalty", value, value - reach, value + reach, n, needed, looks)
        return Finding(CODE, message, view.positions(group.pairs), evidence, view.tokens_of(group.pairs), estimate)
    return None


def _is_penalty(fit: _Fit) -> bool:
    return (
        fit.shift.t >= _SURE and fit.shift.value >= _SMALLEST and fit.new <= _NEW_LOSE and fit.seen >= _SEEN_GAIN
    )


def _fits(history: History) -> list[_Fit]:
    """What differs between seen and new tokens, with "seen" counted from the response alone and from all of the context."""
    delta = history.delta.clamp(-_LARGEST, _LARGEST)
    bins = torch.bucketize(history.rollout, torch.tensor(_BINS, dtype=torch.float64))
    sample = torch.unique(history.sample, return_inverse=True)[1]
    found = []
    for where, seen in (
        ("the response", history.in_response),
        ("the prompt or the response", history.in_response | history.in_prompt),
    ):
        if not bool(seen.any()) or bool(seen.all()):
            continue
        x, y = _within(bins, seen.double()), _within(bins, delta)
        shift = mean_of(torch.bincount(sample, weights=x * y), torch.bincount(sample, weights=x * x))
        found.append(_Fit(where, shift, len(delta), _gain_over_loss(delta[~seen]), _gain_over_loss(delta[seen])))
    return found


def _within(bins: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values less their mean in each bin."""
    size = len(_BINS) + 1
    n = torch.bincount(bins, minlength=size).clamp(min=1)
    return values - (torch.bincount(bins, weights=values, minlength=size) / n)[bins]


def _gain_over_loss(delta: torch.Tensor) -> float:
    excess = torch.expm1(delta)
    gain, loss = float(excess.clamp(min=0).sum()), float((-excess).clamp(min=0).sum())
    return gain / loss if loss > 0 else math.inf
