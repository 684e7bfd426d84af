"""Samples that differ alike: a fault may concern some samples only, and in a mean over all of them it looks like another.

The level of a sample is its mismatch in nats of logit (:attr:`Moments.level`). Two groups are told apart where one normal
distribution of log-levels is clearly a worse description than two, and the two hardly overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from slime_instrument._analysis.evidence import View
from slime_instrument._analysis.moments import Moments

__all__ = ["Group", "groups", "moments_of"]

_TOKENS = 12  # of a sample, below which its level says little
_SAMPLES = 3  # in the smaller group
_APART = 3.0  # means of the groups, in standard deviations within them
_TIMES = 1.6  # and as a ratio of levels
_BETTER = 12.0  # log-likelihood that two groups must gain for their two further parameters
_FLOOR = 1e-3  # nats of logit; smaller levels are alike


@dataclass(frozen=True)
class Group:
    """Samples that are judged together.

    Attributes:
        pairs: which pairs, bool, shape ``(S,)``.
        moments: theirs.
        part: ``all``, or ``some`` and ``others`` where the levels of samples fall into two groups.
    """

    pairs: torch.Tensor
    moments: Moments
    part: str


def moments_of(view: View) -> Moments:
    """The sums of the open tokens, made once for a view."""
    if "moments" not in view.memo:
        view.memo["moments"] = Moments.of(view.blocks(), len(view.table.lengths))
    moments: Moments = view.memo["moments"]
    return moments


def groups(view: View) -> tuple[Group, ...]:
    """All samples with open tokens, or two groups of them, the one with the larger mismatch first."""
    if "groups" not in view.memo:
        view.memo["groups"] = _groups(moments_of(view))
    found: tuple[Group, ...] = view.memo["groups"]
    return found


def _groups(moments: Moments) -> tuple[Group, ...]:
    present = moments.n > 0
    if not bool(present.any()):
        return ()
    edge = _edge(moments)
    if edge is None:
        return (Group(present, moments.only(present), "all"),)
    level = moments.level.nan_to_num(0.0)
    high = present & (level > edge)
    low = present & ~high
    return Group(high, moments.only(high), "some"), Group(low, moments.only(low), "others")


def _edge(moments: Moments) -> float | None:
    """The level between two groups; None where there is one group."""
    telling = (moments.n >= _TOKENS) & (moments.scale > 0)
    x = (moments.level[telling] + _FLOOR).log().sort().values
    n = len(x)
    if n < 2 * _SAMPLES:
        return None
    # The best cut of the sorted levels: the one that leaves least variance within.
    counts = torch.arange(1, n, dtype=torch.float64)
    sums, squares = x.cumsum(0)[:-1], x.square().cumsum(0)[:-1]
    left = squares - sums.square() / counts
    right = (x.square().sum() - squares) - (x.sum() - sums).square() / (n - counts)
    within = left + right
    within[: _SAMPLES - 1] = math.inf
    within[n - _SAMPLES :] = math.inf
    cut = int(within.argmin())
    variance = max(float(within[cut]) / (n - 2), 1e-6)
    whole = max(float(x.var(unbiased=True)), 1e-6)
    means = float(x[: cut + 1].mean()), float(x[cut + 1 :].mean())
    share = (cut + 1) / n
    entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
    gained = n / 2 * math.log(whole / variance) - n * entropy
    apart = (means[1] - means[0]) / math.sqrt(variance)
    if gained < _BETTER or apart < _APART or means[1] - means[0] < math.log(_TIMES):
        return None
    return math.exp(float(x[cut] + x[cut + 1]) / 2) - _FLOOR
