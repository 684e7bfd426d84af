"""The engine penalised tokens that the context holds already; training's probabilities know no penalty.

A penalty takes probability from tokens seen before and gives it to all others: training finds the former more probable
than the engine did and the latter less, both without exception but for noise. E[ρ] over all of them stays 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from slime_instrument._analysis.diagnosis import Estimate, Finding
from slime_instrument._analysis.evidence import View
from slime_instrument._analysis.findings import temperature
from slime_instrument._analysis.groups import Group, groups
from slime_instrument._analysis.history import History, history_of
from slime_instrument._analysis.moments import Ratio, mean_of

CODE = "sampling-penalty"
ORDER = 80
_SURE_OF_NEW, _SURE_OF_SEEN = 5.0, 3.0  # standard errors by which new tokens lose and seen ones gain
_NEW_LOSE, _SEEN_GAIN = 0.4, 2.0  # gain over loss among new tokens at most, and among seen ones at least
_SMALLEST = 0.05  # nats
_QUANTILES = (0.85, 0.95, 0.99)  # of δ among seen tokens: where the others leave the normaliser alone
_LARGEST = 5.0


@dataclass(frozen=True)
class Fit:
    """Gain and loss of tokens that ``where`` held already, and of new ones."""

    where: str
    n_seen: int
    new: Ratio
    seen: Ratio
    new_gain: float
    seen_gain: float
    penalty: tuple[float, ...]

    @property
    def t(self) -> float:
        """Standard errors, as a part of what is asked for."""
        return min(-self.new.t / _SURE_OF_NEW, self.seen.t / _SURE_OF_SEEN)

    @property
    def named(self) -> bool:
        return (
            self.t >= 1
            and self.new.beyond(_SURE_OF_NEW)
            and self.seen.beyond(_SURE_OF_SEEN)
            and self.new_gain <= _NEW_LOSE
            and self.seen_gain >= _SEEN_GAIN
            and self.penalty[1] >= _SMALLEST
        )


def find(view: View) -> Finding | None:
    for group in groups(view):
        fit = fit_of(view, group)
        if fit is None:
            continue
        low, value, high = fit.penalty
        message = (
            f"In {int(group.pairs.sum())} samples the engine's probabilities of tokens that {fit.where} held already "
            f"are too small, by up to about {value:.3g} nats of logit, and those of new tokens too large. The engine "
            "sampled with a repetition, presence or frequency penalty; training knows none. Switch it off, or expect "
            "these ratios."
        )
        evidence = {"nats": value, "seen_in": fit.where, "seen_tokens": fit.n_seen, "mean_ratio_new": 1 + fit.new.value,
                    "mean_ratio_seen": 1 + fit.seen.value}  # fmt: skip
        n = group.n_tokens
        needed = max(2, min(n, math.ceil(n / fit.t**2))) if math.isfinite(fit.t) else 2
        looks = ("a logit bias against frequent tokens", "n-gram blocking")
        estimate = Estimate("penalty", value, low, high, n, needed, looks)
        return Finding(CODE, message, view.positions(group.pairs), evidence, view.tokens_of(group.pairs), estimate)
    return None


def fit_of(view: View, group: Group) -> Fit | None:
    """The penalty of a group; None where its numbers show none."""
    memo = view.memo.setdefault("penalty", {})
    if group.part not in memo:
        memo[group.part] = _fit(view, group)
    fit: Fit | None = memo[group.part]
    return fit


def _fit(view: View, group: Group) -> Fit | None:
    if group.level < _SMALLEST or temperature.fit_of(view, group) is not None:
        return None
    history = history_of(view, group.pairs)
    named = [fit for fit in _fits(history) if fit.named] if history is not None else []
    return max(named, key=lambda one: one.t, default=None)


def _fits(history: History) -> list[Fit]:
    """With "seen" counted from the response alone, and from all of the context."""
    delta = history.delta.clamp(-_LARGEST, _LARGEST)
    # A few tokens with a ratio of twenty would hide how sure the sign is.
    bounded, excess = torch.expm1(delta.clamp(-1.0, 1.0)), torch.expm1(delta)
    sample = torch.unique(history.sample, return_inverse=True)[1]
    found = []
    for where, seen in (
        ("the response", history.in_response),
        ("the prompt or the response", history.in_response | history.in_prompt),
    ):
        if not bool(seen.any()) or bool(seen.all()):
            continue
        new, known = (
            mean_of(torch.bincount(sample, weights=bounded * own), torch.bincount(sample, weights=own.double()))
            for own in (~seen, seen)
        )
        ordered = delta[seen].sort().values
        penalty = tuple(float(ordered[int(q * (len(ordered) - 1))]) for q in _QUANTILES)
        gains = _gain_over_loss(excess[~seen]), _gain_over_loss(excess[seen])
        found.append(Fit(where, len(ordered), new, known, *gains, penalty))
    return found


def _gain_over_loss(excess: torch.Tensor) -> float:
    gain, loss = float(excess.clamp(min=0).sum()), float((-excess).clamp(min=0).sum())
    return gain / loss if loss > 0 else math.inf
