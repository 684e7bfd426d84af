"""The two sides scored the response after different contexts: worst where it begins, and fading along it."""

from __future__ import annotations

import math

import torch

from slime_instrument._analysis.diagnosis import Estimate, Finding
from slime_instrument._analysis.evidence import View
from slime_instrument._analysis.groups import Group, groups
from slime_instrument._analysis.history import history_of
from slime_instrument._analysis.levels import MORE_THAN_KERNELS
from slime_instrument._analysis.moments import Ratio, mean_of

CODE = "context-differs"
ORDER = 85
_SURE = 5.0  # standard errors
# Fall of log |δ| per unit of log(1 + place in the response): between weights rounded to 8 bits, and a missing token.
_FADES = 0.18
_CERTAIN = -0.05  # log μ above which a token cannot differ much, whatever the context
_BINS = (-8.0, -5.0, -3.5, -2.5, -1.5, -0.8, -0.3)
_FLOOR = 1e-3  # nats of logit


def find(view: View) -> Finding | None:
    for group in groups(view):
        fade = _fade(view, group)
        if fade is None or fade.value < _FADES or not fade.beyond(_SURE):
            continue
        n, value, reach = group.n_tokens, fade.value, 2 * fade.error
        message = (
            f"In {int(group.pairs.sum())} samples |δ| is largest where the response begins and falls along it: as "
            f"the place to the power of {-value:.2g} (±{reach:.2g}). The engine saw another "
            "context than training: a missing or additional prompt token, another system prompt or chat template, lost "
            "turns. Compare the token ids that were sent to the engine with those in the dump."
        )
        looks = ("weights that differ mainly in what they make of a prompt",)
        needed = max(2, min(n, math.ceil(n * (_SURE / fade.t) ** 2)))
        estimate = Estimate("fading", value, value - reach, value + reach, n, needed, looks)
        evidence = {"fading": value, "level": group.level}
        return Finding(CODE, message, view.positions(group.pairs), evidence, view.tokens_of(group.pairs), estimate)
    return None


def _fade(view: View, group: Group) -> Ratio | None:
    """How fast the mismatch fades in a group, among tokens of like log μ; None where it is too small to ask."""
    if group.level < MORE_THAN_KERNELS:
        return None
    history = history_of(view, group.pairs)
    if history is None:
        return None
    telling = history.rollout < _CERTAIN
    if int(telling.sum()) < 3:
        return None
    rollout = history.rollout[telling]
    size = (history.delta[telling].abs() / -torch.expm1(rollout) + _FLOOR).log()
    place = -torch.log1p(history.index[telling].double())
    bins = torch.bucketize(rollout, torch.tensor(_BINS, dtype=torch.float64))
    x, y = _within(bins, place), _within(bins, size)
    sample = torch.unique(history.sample[telling], return_inverse=True)[1]
    return mean_of(torch.bincount(sample, weights=x * y), torch.bincount(sample, weights=x * x))


def _within(bins: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    size = len(_BINS) + 1
    n = torch.bincount(bins, minlength=size).clamp(min=1)
    return values - (torch.bincount(bins, weights=values, minlength=size) / n)[bins]
