"""The sides differ by more than kernels do, and nothing else says why: in all samples, in a group of them, or at single
tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from slime_instrument._analysis.diagnosis import Estimate, Finding, View
from slime_instrument._analysis.groups import MORE_THAN_KERNELS, Group, as_much_as, groups, outliers
from slime_instrument._analysis.moments import mean_of

__all__ = ["single_tokens", "unexplained_mismatch"]

_CODE = "unexplained-mismatch"
_SURE = 3.0  # standard errors above the line
_ONE_SIDED = 0.5  # |mean δ| over mean |δ|
_SMALLEST = 0.02  # mean |δ|; where nearly all tokens are certain, a level says little
_POSITIVE = 0.05  # mean δ in nats that no sampling explains
_SURE_OF_SIGN = 6.0


def unexplained_mismatch(view: View) -> Finding | None:
    """All samples, or a group of them, differ by more than kernels do."""
    apart = outliers(view)
    for group in apart or groups(view):
        moments = group.moments
        level, mean = mean_of(moments.size, moments.scale), mean_of(moments.delta, moments.n)
        size = moments.total("size") / group.n_tokens if group.n_tokens else 0.0
        above = group.level - MORE_THAN_KERNELS
        if apart and group is apart[0]:
            sure = True  # its distance from the others is no chance
        elif level.n_samples == 1:
            sure = above > MORE_THAN_KERNELS  # one sample has no spread; twice the line takes its place
        else:
            sure = level.error * _SURE <= above
        large = size > _SMALLEST and above > 0 and sure
        seen_before = mean.value > _POSITIVE and mean.beyond(_SURE_OF_SIGN)
        if large or seen_before:
            signed = moments.total("delta") / group.n_tokens
            return _finding(view, group, apart[1:], group.level, level.error, signed, size, seen_before)
    return None


def _finding(
    view: View,
    group: Group,
    others: Sequence[Group],
    level: float,
    error: float,
    mean: float,
    size: float,
    seen_before: bool,
) -> Finding:
    n, many = group.n_tokens, int(group.pairs.sum())
    who = "all samples" if group.part == "all" else f"{many} of {int((view.counts > 0).sum())} samples"
    kind = "one-sided" if abs(mean) > _ONE_SIDED * size else "noise-like"
    beside = "".join(f", and by {one.level:.3g} in the others" for one in others if one is not group)
    message = (
        f"In {who} the two sides differ by {level:.3g} nats of logit{beside}, {as_much_as(level)}; it is {kind} "
        f"(mean δ {mean:+.3g}, mean |δ| {size:.3g}). Two bf16 kernels of a small model differ by "
        "0.05 to 0.09. These files do not show the cause: other weights, a lower precision, another attention or "
        "routing, or a context that differs everywhere."
    )
    if seen_before:
        message += (
            " A mean δ above 0 cannot come from tokens that were sampled from the logged probabilities: the engine "
            "logged others than those that it sampled with, or training has already learned from these samples."
        )
    above = max(level - MORE_THAN_KERNELS, 1e-9)
    needed = max(2, min(n, math.ceil(n * (_SURE * error / above) ** 2))) if math.isfinite(error) else n
    reach = 2 * error if math.isfinite(error) else 0.0
    estimate = Estimate("level", level, level - reach, level + reach, n, needed, ("every cause that has no name here",))
    evidence = {"level": level, "ordinary_up_to": MORE_THAN_KERNELS, "kind": kind, "mean": mean, "mean_abs": size}
    return Finding(_CODE, message, view.positions(group.pairs), evidence, view.tokens_of(group.pairs), estimate)


# --- single tokens ---

_LONELY = 0.5  # |δ| in nats of a single token that stands out,
_TIMES = 20.0  # and over what 99 % of the tokens stay below


def single_tokens(view: View, findings: Sequence[Finding]) -> Finding | None:
    """Single tokens that differ by much more than nearly all others, in samples that no finding names."""
    if any(one.code == _CODE for one in findings):
        return None
    named = {position for one in findings for position in one.samples}
    rest = torch.tensor([pair.position not in named for pair in view.table.pairs], dtype=torch.bool)
    tokens = view.open & view.tokens_of(rest)
    sizes = (block.size for block in view.table.blocks(tokens) if len(block))
    largest = max((float(size.max()) for size in sizes), default=0.0)
    if largest <= _LONELY:
        return None
    values = torch.cat([block.size for block in view.table.blocks(tokens)])
    usual = float(values.kthvalue(min(len(values), int(0.99 * len(values)) + 1)).values)
    found = torch.zeros_like(tokens)
    found[tokens] = values > max(_LONELY, _TIMES * usual)
    n = int(found.sum())
    if not n:
        return None
    message = (
        f"{n} of {len(values)} tokens stand out: |δ| is up to {largest:.3g} nats there, and at most {usual:.3g} at "
        "99 % of the tokens. No known cause fits."
    )
    evidence = {"kind": "tokens", "n_tokens": n, "max_abs": largest, "p99": usual}
    return Finding(_CODE, message, view.positions_with(found), evidence, found)
