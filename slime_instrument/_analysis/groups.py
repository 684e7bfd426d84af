"""Samples that differ alike: a fault may concern some samples only, and a mean over all makes it look like another.

The level of a sample is its mismatch in nats of logit, Σ\\|δ\\| / Σ(1 - μ). Two groups are told apart where one normal
distribution of log-levels is clearly a worse description than two, and the two hardly overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from slime_instrument._analysis.diagnosis import View
from slime_instrument._analysis.moments import Moments

__all__ = ["MORE_THAN_KERNELS", "Group", "as_much_as", "groups", "moments_of", "outliers"]

# --- what level is ordinary ---
# The numbers come from a small model in bf16 (SmolLM2-135M, vLLM against transformers). Larger models differ less.

MORE_THAN_KERNELS = 0.14
"""Between bf16 kernels (0.05 to 0.09) and weights rounded to eight bits."""

_EIGHT_BITS = 0.23
_FOUR_BITS = 1.5


def as_much_as(level: float) -> str:
    """What a level is comparable with, in words."""
    if level < MORE_THAN_KERNELS:
        return "as much as two bf16 kernels do"
    if level < (_EIGHT_BITS * _FOUR_BITS) ** 0.5:
        return "about as much as weights rounded to 8 bits"
    if level < 2 * _FOUR_BITS:
        return "about as much as weights rounded to 4 bits"
    return "more than weights rounded to 4 bits"


# --- which samples have another level than the rest ---

_TOKENS = 12  # of a sample, below which its level says little
_FEWEST = 8  # tokens of a sample that is told apart by a step alone
_SAMPLES = 3  # in the smaller group
_APART = 3.0  # means of the groups, in standard deviations within them
_TIMES = 1.6  # and as a ratio of levels
_BETTER = 12.0  # log-likelihood that two groups must gain for their two further parameters
_STEP = 4.0  # ratio of levels between few samples and all others, from which the few are a group
_ENOUGH = 1 << 19  # tokens of a group; more do not make anything clearer
_FLOOR = 1e-3  # nats of logit; smaller levels are alike


@dataclass(frozen=True)
class Group:
    """Samples that are judged together.

    Attributes:
        pairs: which pairs, bool, shape ``(S,)``.
        part: ``all``, or ``some`` and ``others`` where the levels of samples fall into two groups.
        moments: the sums of their tokens; of many tokens, those of some pairs, evenly spread over the group.
    """

    pairs: torch.Tensor
    part: str
    moments: Moments

    @property
    def n_tokens(self) -> int:
        """Tokens that the moments rest on."""
        return int(self.moments.total("n"))

    @property
    def level(self) -> float:
        """Mismatch in nats of logit; 0 where every token is certain."""
        scale = self.moments.total("scale")
        return self.moments.total("size") / scale if scale > 0 else 0.0


def groups(view: View) -> tuple[Group, ...]:
    """All samples with open tokens, or two groups of them, the one with the larger mismatch first."""
    if "groups" not in view.memo:
        view.memo["groups"] = tuple(Group(pairs, part, moments_of(view, pairs)) for pairs, part in _parts(view))
    found: tuple[Group, ...] = view.memo["groups"]
    return found


def outliers(view: View) -> tuple[Group, ...]:
    """Samples that differ by more than kernels do and more than the others, and the others; empty if all are alike.

    Beside the two groups of :func:`groups`, this sees groups of one or two samples: those above a step of
    :data:`_STEP` times in the sorted levels.
    """
    found = groups(view)
    if len(found) == 2:
        return found if found[0].level > MORE_THAN_KERNELS else ()
    level, scale = _levels(view)
    usable = ((view.counts >= _FEWEST) & (scale > 0)).nonzero().flatten()
    order = usable[level[usable].argsort()]
    if len(order) < 2:
        return ()
    steps = (level[order][1:] + _FLOOR) / (level[order][:-1] + _FLOOR)
    steps[level[order][1:] <= MORE_THAN_KERNELS] = 0.0
    cut = int(steps.argmax())
    if float(steps[cut]) < _STEP:
        return ()
    high = torch.zeros(len(level), dtype=torch.bool)
    high[order[cut + 1 :]] = True
    # A sample that stands out by one token is no group: that token is what stands out.
    largest = torch.zeros(len(level)).scatter_reduce(0, view.sample, view.size, "amax")
    high &= (view.pair_sums.size - largest) / scale > MORE_THAN_KERNELS
    if not bool(high.any()):
        return ()
    rest = (view.counts > 0) & ~high
    return Group(high, "some", moments_of(view, high)), Group(rest, "others", moments_of(view, rest))


def moments_of(view: View, pairs: torch.Tensor) -> Moments:
    """The sums of the open tokens of some pairs, bool, shape ``(S,)``, or of as many of them as are enough."""
    counts = view.counts
    total = float(counts[pairs].sum())
    if total > _ENOUGH:
        order = pairs.nonzero().flatten()
        step = math.ceil(len(order) / max(1, round(len(order) * _ENOUGH / total)))
        pairs = torch.zeros_like(pairs)
        pairs[order[::step]] = True
    if bool(pairs[counts > 0].all()):
        return Moments.of(view.blocks(), len(counts)).only(pairs)
    return Moments.of(view.table.blocks(view.open & view.tokens_of(pairs)), len(counts)).only(pairs)


def _parts(view: View) -> list[tuple[torch.Tensor, str]]:
    present = view.counts > 0
    if not bool(present.any()):
        return []
    level, scale = _levels(view)
    edge = _edge(level[(view.counts >= _TOKENS) & (scale > 0)])
    if edge is None:
        return [(present, "all")]
    high = present & (level > edge)
    return [(high, "some"), (present & ~high, "others")]


def _levels(view: View) -> tuple[torch.Tensor, torch.Tensor]:
    """Level and Σ(1 - μ) of each pair, float64, both of shape ``(S,)``."""
    scale = torch.zeros(len(view.counts), dtype=torch.float64)
    for block in view.blocks():
        if len(block):
            # Float32 is enough for what only weighs samples against each other.
            scale[block.pairs] = block.sums(-torch.expm1(block.rollout.clamp(max=0.0))).double()
    return (view.pair_sums.size / scale).nan_to_num(0.0, posinf=0.0), scale


def _edge(level: torch.Tensor) -> float | None:
    """The level between two groups; None where there is one group."""
    x = (level + _FLOOR).log().sort().values
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
