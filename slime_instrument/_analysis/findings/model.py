"""The two sides compute with different models: log-probs of a shorter type, older weights, another context,
other kernels."""

from __future__ import annotations

import math

import torch

from slime_instrument._analysis.diagnosis import Estimate, Finding, View
from slime_instrument._analysis.drift import staleness_of
from slime_instrument._analysis.findings.history import history_of
from slime_instrument._analysis.groups import MORE_THAN_KERNELS, Group, groups
from slime_instrument._analysis.moments import Ratio, mean_of
from slime_instrument._analysis.statistics import log_student_tail

__all__ = ["context_differs", "dtype_rounding", "low_probability_tail", "stale_weights"]

# --- dtype-rounding ---

_ENOUGH = 16  # tokens
_PROBE = 4096  # tokens that decide whether to look at all of them
_EQUAL = 0.98
_DISTINCT = 32  # different values that must all be short numbers
_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_rounding(view: View) -> Finding | None:
    """One side is the other one, rounded to a shorter type."""
    return _nothing_else(view) or _under_noise(view)


def _nothing_else(view: View) -> Finding | None:
    """The rounding is the whole difference."""
    if view.n_open < _ENOUGH:
        return None
    rollout, train = view.rollout_values(), view.train_values()
    for side, rounded, exact in (("train", train, rollout), ("rollout", rollout, train)):
        for name, dtype in _TYPES.items():
            if not _is_rounded(rounded[:_PROBE], exact[:_PROBE], dtype) or not _is_rounded(rounded, exact, dtype):
                continue
            size = float(view.size.mean())
            message = (
                f"The {side} side holds the other side's log-probs rounded to {name}: all {len(rounded)} values are "
                f"{name} numbers and equal after rounding; mean |δ| {size:.3g}. The logits "
                "or the log-probs passed through that type on one side; keep the LM head and the softmax in float32."
            )
            estimate = Estimate("rounding", size, size, size, len(rounded), _ENOUGH)
            samples, evidence = view.positions_with(view.open), {"side": side, "dtype": name}
            return Finding("dtype-rounding", message, samples, evidence, view.open, estimate)
    return None


def _under_noise(view: View) -> Finding | None:
    """Every value of a side is one of a shorter type than the one that it is stored in, whatever else differs.

    A value that was never rounded falls on such a number with a chance of 1 in 65,536 (bfloat16) or 8,192 (float16).
    Values that are stored in the short type itself are no finding: the file says so.
    """
    comparable = view.table.comparable
    for side, values in (("rollout", view.table.rollout), ("train", view.table.train)):
        if side == "train" and not view.table.train_dtypes.isdisjoint(_TYPES.values()):
            continue
        for name, dtype in _TYPES.items():  # most bfloat16 numbers are float16 numbers too, but not the reverse
            probe = values[comparable & (values != 0)][:_PROBE]
            if len(torch.unique(probe)) < _DISTINCT or not _on_grid(probe, dtype):
                continue
            own = values[comparable]
            if not _on_grid(own, dtype):
                continue
            # Half a unit in the last place at most, a quarter on average.
            error = float((_next_to_zero(probe, dtype) - probe).abs().mean()) / 4
            message = (
                f"All {len(own)} log-probs of the {side} side are {name} numbers, stored in a longer type: they were "
                f"rounded, which alone differs by about {error:.2g} nats per token; mean |δ| is "
                f"{float(view.table.size.mean()):.3g}. Keep log-probs in float32 from the softmax to the dump."
            )
            looks = ("a coarse grid of another origin, such as values printed with few digits",)
            estimate = Estimate("rounding", error, error, error, len(own), _DISTINCT, looks)
            samples, evidence = view.positions_with(comparable), {"side": side, "dtype": name, "under_noise": True}
            return Finding("dtype-rounding", message, samples, evidence, None, estimate)
    return None


def _on_grid(values: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((values.to(dtype).float() == values).all())


def _is_rounded(rounded: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether ``rounded`` is ``exact`` in ``dtype``, to the nearest or towards zero, and that changes it."""
    nearest = exact.to(dtype).float()
    if bool((nearest == exact).float().mean() > 0.5) or not _on_grid(rounded, dtype):
        return False
    toward_zero = rounded == torch.where(nearest.abs() > exact.abs(), _next_to_zero(nearest, dtype), nearest)
    return any(float(equal.float().mean()) >= _EQUAL for equal in (rounded == nearest, toward_zero))


def _next_to_zero(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The neighbour of each value in ``dtype`` on the side of zero: the bit pattern one lower."""
    bits = values.to(dtype).view(torch.int16)
    return torch.where(values == 0, values, (bits - 1).view(dtype).float())


# --- stale-weights ---

_SAMPLES = 5  # samples with tokens
_TOKENS = 16  # of a sample, from which its level says something
_GROWTH = 1.5  # of mean |δ| between the least and the most stale
_SMALLEST = 0.01  # mean |δ| of the most stale that is worth a name
_SURE = math.log(1e-3)
_LARGE, _SURE_OF_LARGE = 2.5, math.log(1.4e-2)  # a growth that few samples cannot show by chance needs less
_BETWEEN = 0.15  # by how much samples may differ for reasons of their own, in log |δ|
_FLOOR = 1e-4  # nats; differences below are alike
_EDGES = (-8.0, -4.0, -2.0, -1.0, -0.5, -0.25, -0.1, -0.03, -0.01)


def stale_weights(view: View) -> Finding | None:
    """The mismatch grows with the age of the weights that sampled."""
    staleness = staleness_of(view.table, view.train.provenance.weight_version)
    usable = [i for i, age in enumerate(staleness) if age is not None and float(view.counts[i]) > 0]
    ages = torch.tensor([float(staleness[i] or 0) for i in usable], dtype=torch.float64)
    if len(usable) < _SAMPLES or len(set(ages.tolist())) < 2:
        return None
    chosen = torch.tensor(usable)
    level, error = (values[chosen] for values in _level(view))
    size = view.mean_abs[chosen]
    by_age = {int(age): float(size[ages == age].mean()) for age in sorted(set(ages.tolist()))}
    youngest, oldest = min(by_age), max(by_age)
    growth = math.exp(float(level[ages == oldest].mean() - level[ages == youngest].mean()))
    least_sure = _SURE_OF_LARGE if growth >= _LARGE else _SURE
    if growth < _GROWTH or by_age[oldest] < max(_SMALLEST, by_age[youngest]):
        return None
    if _log_chance(ages, level, error) > least_sure:
        return None
    shown = ", ".join(f"{age}: {mean:.3g}" for age, mean in by_age.items())
    message = (
        f"mean |δ| grows with weight staleness ({shown}): samples were generated by weights up to {oldest} updates "
        "old. Expected with partial rollout or asynchronous training; otherwise the engines missed a weight update."
    )
    stale = chosen[ages > youngest]
    evidence = {"mean_abs_by_staleness": {str(age): mean for age, mean in by_age.items()}}
    n = int(view.counts[stale].sum())
    behind = ages[ages > youngest] - youngest
    estimate = Estimate(
        "updates behind", float(behind.mean()), float(behind.min()), float(behind.max()), n, min(n, _SAMPLES * _TOKENS),
        ("another fault that concerns the older samples alone",),
    )  # fmt: skip
    return Finding("stale-weights", message, view.positions(stale), evidence, view.tokens_of(stale), estimate)


def _level(view: View) -> tuple[torch.Tensor, torch.Tensor]:
    """Per sample, how much larger \\|δ\\| is than usual for tokens of that log μ, and the variance of that number.

    A mean of logarithms, because a few improbable tokens would decide any other; relative to tokens of the same
    log μ, because samples differ in that. Both of shape ``(S,)``.
    """
    bins = torch.bucketize(view.rollout_values(), torch.tensor(_EDGES))
    size = _within(bins, (view.size.double() + _FLOOR).log())
    level = view.sums(size) / view.counts
    spread = float((size - level[view.sample]).square().mean())
    return level, spread / view.counts + _BETWEEN**2


def _log_chance(ages: torch.Tensor, level: torch.Tensor, error: torch.Tensor) -> float:
    """Log-probability that the level grows this much with the age by chance.

    The spread around the line is known beforehand, from the tokens. Only where the samples spread more than that does
    their own number of them limit the certainty.
    """
    x = ages - ages.mean()
    y = level - level.mean()
    slope = float(x @ y) / float(x @ x)
    df = len(x) - 2
    if slope <= 0 or df < 1:
        return 0.0
    expected, found = float(error.mean()), float((y - slope * x).square().sum()) / df
    t = slope * math.sqrt(float(x @ x) / max(expected, found))
    certain = df if found > 2 * expected else max(df, 60)
    # Growth only: half of both tails.
    return float(log_student_tail(torch.tensor(t), torch.tensor(float(certain)))) - math.log(2)


# --- context-differs ---

_SURE_OF_FADING = 5.0  # standard errors
# Fall of log |δ| per unit of log(1 + place in the response): between weights rounded to 8 bits, and a missing token.
_FADES = 0.18
_CERTAIN = -0.05  # log μ above which a token cannot differ much, whatever the context
_BINS = (-8.0, -5.0, -3.5, -2.5, -1.5, -0.8, -0.3)
_FLOOR_OF_FADING = 1e-3  # nats of logit


def context_differs(view: View) -> Finding | None:
    """The two sides scored the response after different contexts: worst where it begins, and fading along it."""
    for group in groups(view):
        fade = _fade(view, group)
        if fade is None or fade.value < _FADES or not fade.beyond(_SURE_OF_FADING):
            continue
        n, value, reach = group.n_tokens, fade.value, 2 * fade.error
        message = (
            f"In {int(group.pairs.sum())} samples |δ| is largest where the response begins and falls along it: as "
            f"the place to the power of {-value:.2g} (±{reach:.2g}). The engine saw another "
            "context than training: a missing or additional prompt token, another system prompt or chat template, lost "
            "turns. Compare the token ids that were sent to the engine with those in the dump."
        )
        looks = ("weights that differ mainly in what they make of a prompt",)
        needed = max(2, min(n, math.ceil(n * (_SURE_OF_FADING / fade.t) ** 2)))
        estimate = Estimate("fading", value, value - reach, value + reach, n, needed, looks)
        samples, evidence = view.positions(group.pairs), {"fading": value, "level": group.level}
        return Finding("context-differs", message, samples, evidence, view.tokens_of(group.pairs), estimate)
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
    size = (history.delta[telling].abs() / -torch.expm1(rollout) + _FLOOR_OF_FADING).log()
    place = -torch.log1p(history.index[telling].double())
    bins = torch.bucketize(rollout, torch.tensor(_BINS, dtype=torch.float64))
    x, y = _within(bins, place), _within(bins, size)
    sample = torch.unique(history.sample[telling], return_inverse=True)[1]
    return mean_of(torch.bincount(sample, weights=x * y), torch.bincount(sample, weights=x * x))


def _within(bins: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Each value less the mean of its bin."""
    n = torch.bincount(bins).clamp(min=1)
    return values - (torch.bincount(bins, weights=values) / n)[bins]


# --- low-probability-tail ---

_LOW = -4.0  # log μ from which a token is improbable
_FEWEST_OUTLIERS = 4
_OUTLIER = 0.4  # |δ| in nats, and at least ten times what is usual
_WIDEST = 0.4  # share of the tokens that can be a tail
_IN_TAIL = 0.3  # share of the tail that is off
_OF_ONE_SIGN = 0.9  # share of one sign from which a temperature fits too
_ELSEWHERE = 0.003  # share of the other tokens that may be off too


def low_probability_tail(view: View) -> Finding | None:
    """The mismatch stands only at tokens that the rollout thought very improbable."""
    size = view.size
    off = size > max(_OUTLIER, 10 * view.noise)
    if int(off.count_nonzero()) < _FEWEST_OUTLIERS:
        return None
    rollout = view.rollout_values()
    # The tail ends where nearly all outliers are below.
    places = rollout[off].sort().values
    edge = float(places[min(len(places) - 1, int(0.98 * len(places)))])
    if edge > _LOW:
        return None
    tail = rollout <= edge
    n_tail, n_off = int(tail.sum()), int(off.sum())
    in_tail = int((off & tail).sum())
    elsewhere = (n_off - in_tail) / max(1, len(size) - n_tail)
    if n_tail > _WIDEST * len(size) or in_tail < _IN_TAIL * n_tail or elsewhere > _ELSEWHERE:
        return None
    mean_tail, mean_rest = float(size[tail].mean()), float(size[~tail].mean())
    if mean_tail < 8 * mean_rest:
        return None
    message = (
        f"{in_tail} of {n_off} outliers have log μ below {edge:.3g}; mean |δ| is {mean_tail:.3g} there and "
        f"{mean_rest:.3g} elsewhere. Kernels differ most where probabilities are tiny; larger than usual noise there "
        "points to a different attention, MoE or softmax kernel in the engine, or to a lower precision."
    )
    delta = view.delta[off & tail]
    one_sided = max(float((delta > 0).double().mean()), float((delta < 0).double().mean()))
    tokens = torch.zeros_like(view.open)
    tokens[view.open] = off
    if one_sided > _OF_ONE_SIGN:
        message += " Nearly all of these differences have one sign, as a different temperature would give them too."
    evidence = {
        "one_sided": one_sided,
        "edge": edge,
        "tokens": n_tail,
        "mean_abs": mean_tail,
        "mean_abs_elsewhere": mean_rest,
    }
    samples = view.positions(sorted(set(view.sample[off].tolist())))
    return Finding("low-probability-tail", message, samples, evidence, tokens)
