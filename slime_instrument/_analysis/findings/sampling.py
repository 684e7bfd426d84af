"""The engine samples otherwise than training computes: another temperature, truncation, penalties.

They are fitted to one group of samples, on the identities that :mod:`~slime_instrument._analysis.moments`
explains. Where they look alike, one asks whether another one fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from slime_instrument._analysis.diagnosis import Estimate, Finding, View
from slime_instrument._analysis.findings.history import History, history_of
from slime_instrument._analysis.groups import Group, groups, moments_of
from slime_instrument._analysis.moments import Moments, Ratio, mean_of
from slime_instrument._format.values import log_probs

__all__ = ["sampling_penalty", "temperature", "truncated_sampling"]

_SURE = 5.0  # standard errors: of the slope, of the other estimates of a temperature, of the mean ratio below 1

_Fit = TypeVar("_Fit")


def _once(view: View, name: str, group: Group, fit: Callable[[View, Group], _Fit]) -> _Fit:
    """What ``fit`` makes of a group; kept under ``name`` for the other findings of this view."""
    fits: dict[str, _Fit] = view.memo.setdefault(name, {})
    if group.part not in fits:
        fits[group.part] = fit(view, group)
    return fits[group.part]


# --- temperature ---

_SMALLEST = 0.03  # |r - 1| worth a name
_AGREE = (0.5, 1.6)  # slope over moment estimate: noise lowers it, and nothing but a temperature brings it near 1
_MODEL = 0.1  # part of r - 1 by which the estimates may be off for other reasons than chance
_MODEL_OF_ENTROPY = 0.01  # what the entropy of a position does not tell of its constant
# Where the engine truncated, too, only the slope is left. Truncation has slopes of its own, but no token gains by it.
_SMALLEST_SLOPE, _SMALLEST_GAIN = 0.07, 0.05  # of gain over loss
_OF_SLOPE = (0.75, 1.25, 2.2)  # r - 1 as a multiple of the slope, which is too small: at least, usually, at most
_INTERVAL = 2.5  # standard errors on either side: two estimates, each with its own
_ENTROPIES = 1 << 18  # tokens whose entropies are used


@dataclass(frozen=True)
class _Temperature:
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


def temperature(view: View) -> Finding | None:
    """The two sides divide the logits by different temperatures: log π = r log μ + c, c of the position alone."""
    fits = [(group, fit) for group in groups(view) if (fit := _temperature_of(view, group)) is not None]
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
    return Finding("temperature", message, view.positions(pairs), evidence, view.tokens_of(pairs), estimate)


def _temperature_of(view: View, group: Group) -> _Temperature | None:
    """The temperature of a group; None where its numbers do not follow one."""
    return _once(view, "temperature", group, _fit_temperature)


def _fit_temperature(view: View, group: Group) -> _Temperature | None:
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
        fit = _Temperature(1 + best.value, 1 + min(ends) - reach, 1 + max(ends) + reach, t, "moments", side)
    elif abs(slope.value) >= _SMALLEST_SLOPE and _truncates(moments) and moments.gain_over_loss >= _SMALLEST_GAIN:
        # The mean ratio is the mass kept, which differs among positions.
        least, usual, most = (part * slope.value for part in _OF_SLOPE)
        reach = _INTERVAL * slope.error
        low, high = 1 + min(least, most) - reach, 1 + max(least, most) + reach
        fit = _Temperature(1 + usual, low, high, abs(slope.t), "slope", "rollout")
    else:
        return None
    exact = _by_entropy(view, group)
    if exact is not None and exact.beyond(_SURE):
        reach = max(2 * exact.error, _MODEL_OF_ENTROPY)
        value = 1 + exact.value
        fit = replace(fit, ratio=value, low=value - reach, high=value + reach, t=abs(exact.t), how="entropies")
    return fit


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


# --- sampling-penalty ---

_SURE_OF_NEW, _SURE_OF_SEEN = 5.0, 3.0  # standard errors by which new tokens lose and seen ones gain
_NEW_LOSE, _SEEN_GAIN = 0.4, 2.0  # gain over loss among new tokens at most, and among seen ones at least
_SMALLEST_PENALTY = 0.05  # nats
_QUANTILES = (0.85, 0.95, 0.99)  # of δ among seen tokens: where the others leave the normaliser alone
_LARGEST = 5.0


@dataclass(frozen=True)
class _Penalty:
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
            and self.penalty[1] >= _SMALLEST_PENALTY
        )


def sampling_penalty(view: View) -> Finding | None:
    """The engine penalised tokens that the context holds already; training's probabilities know no penalty.

    A penalty takes probability from tokens seen before and gives it to all others: training finds the former more
    probable than the engine did and the latter less, both without exception but for noise. E[ρ] over all stays 1.
    """
    for group in groups(view):
        fit = _penalty_of(view, group)
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
        samples, tokens = view.positions(group.pairs), view.tokens_of(group.pairs)
        return Finding("sampling-penalty", message, samples, evidence, tokens, estimate)
    return None


def _penalty_of(view: View, group: Group) -> _Penalty | None:
    """The penalty of a group; None where its numbers show none."""
    return _once(view, "penalty", group, _fit_penalty)


def _fit_penalty(view: View, group: Group) -> _Penalty | None:
    if group.level < _SMALLEST_PENALTY or _temperature_of(view, group) is not None:
        return None
    history = history_of(view, group.pairs)
    named = [fit for fit in _penalties(history) if fit.named] if history is not None else []
    return max(named, key=lambda one: one.t, default=None)


def _penalties(history: History) -> list[_Penalty]:
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
        found.append(_Penalty(where, len(ordered), new, known, *gains, penalty))
    return found


def _gain_over_loss(excess: torch.Tensor) -> float:
    gain, loss = float(excess.clamp(min=0).sum()), float((-excess).clamp(min=0).sum())
    return gain / loss if loss > 0 else math.inf


# --- truncated-sampling ---

_SMALLEST_CUT = 0.005  # mass cut off that is worth a name
_CERTAIN = 0.01  # share of tokens of probability exactly 1 that only truncation makes
_MOST = 0.6  # share of the unsure tokens with δ below 0; a few outliers cut the mean ratio too
# Slope of δ on log μ, at most: training must follow the engine, whose μ the mass does not know. A small top-k ties it
# to log μ more than anything else does; it shows in that hardly a token gains.
_FOLLOWS, _FOLLOWS_AT_LEAST = 0.3, 0.5
_NO_GAIN = 0.02  # gain over loss
_UNEVEN = 0.2  # spread of δ over its mean, at least: what is kept differs from position to position
_ONE_SIDED = 0.5  # gain over loss; 1 for two full distributions, and noise brings a truncated one nearer to it


def truncated_sampling(view: View) -> Finding | None:
    """μ is normalised over the tokens that top-p, top-k or min-p kept: δ is the log of the mass kept there."""
    cuts = [group for group in groups(view) if _cut(view, group)]
    if not cuts:
        return None
    pairs = cuts[0].pairs
    for group in cuts[1:]:
        pairs = pairs | group.pairs
    merged = cuts[0].moments if len(cuts) == 1 else moments_of(view, pairs)
    mass, n = merged.mass, int(merged.total("n"))
    alone = int(merged.total("certain"))
    low, high = 1 + mass.value - 2 * mass.error, min(1.0, 1 + mass.value + 2 * mass.error)
    message = (
        f"In {len(view.positions(pairs))} samples training gives the sampled tokens {1 + mass.value:.3g} of the "
        f"probability that the engine logged, on average ({low:.3g} to {high:.3g}), and hardly ever more: the engine's "
        "probabilities are those after top-p, top-k or min-p, training normalises over the whole vocabulary."
    )
    if alone:
        message += f" {alone} of {n} tokens were alone in what was kept (log μ exactly 0)."
    evidence = {"mass": 1 + mass.value, "certain_tokens": alone, "gain_over_loss": merged.gain_over_loss}
    looks = (
        "training that normalises over more tokens, such as a padded vocabulary",
        "a constant added to log μ",
        "another temperature, where all tokens are about as probable",
    )
    needed = max(2, min(n, math.ceil(n * (_SURE / mass.t) ** 2))) if math.isfinite(mass.t) else 2
    estimate = Estimate("mass", 1 + mass.value, low, high, n, needed, looks)
    return Finding("truncated-sampling", message, view.positions(pairs), evidence, view.tokens_of(pairs), estimate)


def _cut(view: View, group: Group) -> bool:
    moments = group.moments
    mass = moments.mass
    if mass.value > -_SMALLEST_CUT or not mass.beyond(_SURE):
        return False
    if _temperature_of(view, group) is not None or _penalty_of(view, group) is not None:
        # Neither keeps the mean ratio at 1: a strong penalty makes the tokens that would restore it too rare to see.
        return _truncates(moments)
    gain = moments.gain_over_loss
    follows = _FOLLOWS if gain > _NO_GAIN else _FOLLOWS_AT_LEAST
    if abs(moments.slope.value) > follows and moments.slope.beyond(_SURE):
        return False
    mean = moments.total("delta") / group.n_tokens
    if moments.total("square") / group.n_tokens - mean**2 < (_UNEVEN * mean) ** 2:
        return False
    most = moments.total("lower") >= _MOST * moments.total("unsure")
    return most and gain <= _ONE_SIDED


def _truncates(moments: Moments) -> bool:
    """Whether the engine cut its distribution, as it shows beside another temperature."""
    return (
        moments.mass.value < 0
        and moments.mass.beyond(_SURE)
        and moments.total("certain") >= _CERTAIN * moments.total("n")
    )
