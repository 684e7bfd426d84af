"""The two sides divide the logits by different temperatures: log π = r log μ + c, c of the position alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from slime_instrument._analysis.diagnosis import Estimate, Finding
from slime_instrument._analysis.evidence import View
from slime_instrument._analysis.groups import Group, groups
from slime_instrument._analysis.moments import Moments, Ratio, mean_of
from slime_instrument._format.values import log_probs

CODE = "temperature"
ORDER = 80
_SURE = 5.0  # standard errors
_SMALLEST = 0.03  # |r - 1| worth a name
_AGREE = (0.5, 1.6)  # slope over moment estimate: noise lowers it, and nothing but a temperature brings it near 1
_MODEL = 0.1  # part of r - 1 by which the estimates may be off for other reasons than chance
_MODEL_OF_ENTROPY = 0.01  # what the entropy of a position does not tell of its constant
# Where the engine truncated, too, only the slope is left. Truncation has slopes of its own, but no token gains by it.
_SMALLEST_SLOPE, _SMALLEST_GAIN = 0.07, 0.05  # of gain over loss
_OF_SLOPE = (0.75, 1.25, 2.2)  # r - 1 as a multiple of the slope, which is too small: at least, usually, at most
_CERTAIN = 0.01  # share of tokens of probability exactly 1 that only truncation makes
_CUT = 5.0  # standard errors of the mean ratio below 1
_INTERVAL = 2.5  # standard errors on either side: two estimates, each with its own
_ENTROPIES = 1 << 18  # tokens whose entropies are used


@dataclass(frozen=True)
class Fit:
    """How one group of samples follows another temperature.

    Attributes:
        ratio: log π / log μ but for the position's constant; the engine's temperature over training's.
        low, high: its interval.
        t: standard errors of the less certain of the two estimates.
        how: ``entropies``, ``moments`` or ``slope``.
        sampled_from: the side that the tokens were sampled from; ``train`` where the engine logged other log-probs than
            those that it sampled with.
    """

    ratio: float
    low: float
    high: float
    t: float
    how: str
    sampled_from: str


def find(view: View) -> Finding | None:
    fits = [(group, fit) for group in groups(view) if (fit := fit_of(view, group)) is not None]
    if not fits:
        return None
    group, fit = fits[0]
    pairs = group.pairs
    for other, second in fits[1:]:
        if second.low <= fit.high and fit.low <= second.high:
            pairs = pairs | other.pairs
    n = int(view.counts[pairs].sum())
    message = (
        f"In {int(pairs.sum())} samples log π follows {fit.ratio:.3g} times log μ (between {fit.low:.3g} and "
        f"{fit.high:.3g}): the engine's temperature is {fit.ratio:.3g} times training's. Compare --rollout-temperature "
        "with what the engine was asked for."
    )
    if fit.sampled_from == "train":
        message += (
            " The tokens fit the training side's distribution, not the logged one: the engine logged its log-probs "
            "before it divided by the temperature."
        )
    evidence = {"ratio": fit.ratio, "how": fit.how, "sampled_from": fit.sampled_from}
    needed = max(1, math.ceil(n * (_SURE / fit.t) ** 2)) if math.isfinite(fit.t) else 2
    looks = (
        "another scale of the logits, such as a soft cap or a quantised LM head",
        "truncated sampling, where all tokens are about as probable",
    )
    estimate = Estimate("temperature", fit.ratio, fit.low, fit.high, n, min(n, needed), looks)
    return Finding(CODE, message, view.positions(pairs), evidence, view.tokens_of(pairs), estimate)


def fit_of(view: View, group: Group) -> Fit | None:
    """The temperature of a group; None where its numbers do not follow one."""
    memo = view.memo.setdefault("temperature", {})
    if group.part not in memo:
        memo[group.part] = _fit(view, group)
    fit: Fit | None = memo[group.part]
    return fit


def _fit(view: View, group: Group) -> Fit | None:
    moments = group.moments
    slope = moments.slope
    if not slope.beyond(_SURE):
        return None
    choices = [(moments.temperature(), "rollout")]
    if moments.mass.beyond(_SURE):  # the mean ratio is not 1: perhaps the tokens were sampled from π
        choices.append((moments.temperature(reverse=True), "train"))
    fits = [(one, side) for one, side in choices if _agree(slope, one)]
    if fits:
        best, side = min(fits, key=lambda fit: abs(slope.value / fit[0].value - 1))
        if abs(best.value) < _SMALLEST:
            return None
        ends = [r.value + sign * _INTERVAL * r.error for r in (slope, best) for sign in (-1, 1)]
        reach = _MODEL * abs(best.value)
        t = min(abs(slope.t), abs(best.t))
        fit = Fit(1 + best.value, 1 + min(ends) - reach, 1 + max(ends) + reach, t, "moments", side)
    elif abs(slope.value) >= _SMALLEST_SLOPE and truncates(moments) and moments.gain_over_loss >= _SMALLEST_GAIN:
        # The mean ratio is the mass kept, which differs among positions.
        least, usual, most = (part * slope.value for part in _OF_SLOPE)
        reach = _INTERVAL * slope.error
        low, high = 1 + min(least, most) - reach, 1 + max(least, most) + reach
        fit = Fit(1 + usual, low, high, abs(slope.t), "slope", "rollout")
    else:
        return None
    exact = _by_entropy(view, group)
    if exact is not None and exact.beyond(_SURE):
        reach = max(2 * exact.error, _MODEL_OF_ENTROPY)
        value = 1 + exact.value
        fit = replace(fit, ratio=value, low=value - reach, high=value + reach, t=abs(exact.t), how="entropies")
    return fit


def truncates(moments: Moments) -> bool:
    """Whether the engine cut its distribution, as it shows beside another temperature."""
    return (
        moments.mass.value < 0
        and moments.mass.beyond(_CUT)
        and moments.total("certain") >= _CERTAIN * moments.total("n")
    )


def _agree(slope: Ratio, moment: Ratio) -> bool:
    if moment.value == 0 or not math.isfinite(moment.value):
        return False
    return _AGREE[0] <= slope.value / moment.value <= _AGREE[1]


def _by_entropy(view: View, group: Group) -> Ratio | None:
    """r - 1 as the slope of δ on log μ among positions of one entropy, where the train dump has entropies.

    c depends on the position's distribution, of which its entropy tells nearly everything that matters; a polynomial in
    the entropy stands for c.
    """
    rows, table = [], view.table
    for i in group.pairs.nonzero().flatten().tolist():
        converted = log_probs(table.pairs[i].train.get("entropy"))
        span = table.tokens_of(i)
        if converted is None or len(converted[0]) != span.stop - span.start:
            return None
        entropy = converted[0].double()
        usable = view.open[span] & entropy.isfinite()
        rows.append(
            torch.stack([table.rollout[span], table.train[span], entropy, torch.full_like(entropy, i)])[:, usable]
        )
        if sum(row.shape[1] for row in rows) > _ENTROPIES:
            break
    if not rows:
        return None
    x, train, h, sample = torch.cat(rows, 1).double()
    controls = torch.stack([h**k for k in range(5)], 1)
    if len(x) < 10 * controls.shape[1]:
        return None
    target = torch.stack([x, train - x], 1)
    target = target - controls @ torch.linalg.lstsq(controls, target).solution
    own = torch.unique(sample, return_inverse=True)[1]
    products = target[:, :1] * target
    spread, together = (torch.bincount(own, weights=products[:, k]) for k in (0, 1))
    return mean_of(together, spread)
