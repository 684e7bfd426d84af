"""μ is normalised over the tokens that top-p, top-k or min-p kept: δ is the log of the mass kept there."""

from __future__ import annotations

import math

from slime_instrument._analysis.diagnosis import Estimate, Finding
from slime_instrument._analysis.evidence import View
from slime_instrument._analysis.findings import sampling_penalty, temperature
from slime_instrument._analysis.groups import Group, groups, moments_of
from slime_instrument._analysis.moments import Ratio

CODE = "truncated-sampling"
ORDER = 80
_SURE = 5.0  # standard errors by which the mean ratio is below 1
_SMALLEST = 0.005  # mass cut off that is worth a name
_MOST = 0.6  # share of the unsure tokens with δ below 0; a few outliers cut the mean ratio too
# Slope of δ on log μ, at most: training must follow the engine, whose μ the mass does not know. A small top-k ties it
# to log μ more than anything else does; it shows in that hardly a token gains.
_FOLLOWS, _FOLLOWS_AT_LEAST = 0.3, 0.5
_NO_GAIN = 0.02  # gain over loss
_UNEVEN = 0.2  # spread of δ over its mean, at least: what is kept differs from position to position
_ONE_SIDED = 0.5  # gain over loss; 1 for two full distributions, and noise brings a truncated one nearer to it


def find(view: View) -> Finding | None:
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
    return Finding(CODE, message, view.positions(pairs), evidence, view.tokens_of(pairs), estimate)


def _cut(view: View, group: Group) -> bool:
    moments = group.moments
    mass: Ratio = moments.mass
    if mass.value > -_SMALLEST or not mass.beyond(_SURE):
        return False
    if temperature.fit_of(view, group) is not None or sampling_penalty.fit_of(view, group) is not None:
        # Neither keeps the mean ratio at 1: a strong penalty makes the tokens that would restore it too rare to see.
        return temperature.truncates(moments)
    gain = moments.gain_over_loss
    follows = _FOLLOWS if gain > _NO_GAIN else _FOLLOWS_AT_LEAST
    if abs(moments.slope.value) > follows and moments.slope.beyond(_SURE):
        return False
    mean = moments.total("delta") / group.n_tokens
    if moments.total("square") / group.n_tokens - mean**2 < (_UNEVEN * mean) ** 2:
        return False
    most = moments.total("lower") >= _MOST * moments.total("unsure")
    return most and gain <= _ONE_SIDED
