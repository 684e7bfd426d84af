"""The sides differ by more than kernels do, and nothing above says why."""

from __future__ import annotations

import math

from slime_instrument._analysis.diagnosis import Estimate, Finding
from slime_instrument._analysis.evidence import View
from slime_instrument._analysis.groups import Group, groups
from slime_instrument._analysis.levels import MORE_THAN_KERNELS, as_much_as
from slime_instrument._analysis.moments import mean_of

CODE = "unexplained-mismatch"
ORDER = 99
_SURE = 3.0  # standard errors above the line
_ONE_SIDED = 0.5  # |mean δ| over mean |δ|
_SMALLEST = 0.02  # mean |δ|; where nearly all tokens are certain, a level says little
_POSITIVE = 0.05  # mean δ in nats that no sampling explains
_SURE_OF_SIGN = 6.0


def find(view: View) -> Finding | None:
    for group in groups(view):
        moments = group.moments
        level, mean, size = (
            mean_of(moments.size, moments.scale), mean_of(moments.delta, moments.n), mean_of(moments.size, moments.n)
        )  # fmt: skip
        above = level.value - MORE_THAN_KERNELS
        large = size.value > _SMALLEST and above > 0 and not level.error * _SURE > above
        seen_before = mean.value > _POSITIVE and mean.beyond(_SURE_OF_SIGN)
        if large or seen_before:
            return _finding(view, group, level.value, level.error, mean.value, size.value, seen_before)
    return None


def _finding(
    view: View, group: Group, level: float, error: float, mean: float, size: float, seen_before: bool
) -> Finding:
    n, many = group.n_tokens, int(group.pairs.sum())
    who = "all samples" if group.part == "all" else f"{many} samples"
    kind = "one-sided" if abs(mean) > _ONE_SIDED * size else "noise-like"
    message = (
        f"In {who} the two sides differ by {level:.3g} nats of logit, {as_much_as(level)}; it is {kind} "
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
    return Finding(CODE, message, view.positions(group.pairs), evidence, view.tokens_of(group.pairs), estimate)
