"""Which tokens and samples moved the model: the derivative of slime's policy loss by each token's log-prob, and the
optimizer steps whose gradient norm stands out.

The derivative is exact where the dump holds what the loss saw; where it does not, :attr:`Gradient.unknown` says which
samples are left out and why. The entropy bonus depends on whole distributions, which no dump has, and is not in it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.pair import ReadPair
from slime_instrument._format.dumps import Provenance
from slime_instrument._format.join import Pair
from slime_instrument._format.values import as_ints, as_list, integers, log_probs, number, show, truth, whole_number

SPIKE = "gradient-spike"

_SHOWN = 20  # shares of a gradient
_NEAR = 8  # steps on each side that a step is held against: the norm moves as training goes on
_FEWEST = 4  # of those; with fewer nothing is ordinary
_TIMES = 3.0  # their median
_SCATTER = 5.0  # standard deviations of their logarithms
_CARRIES = 2.0  # times the largest pull that a sample has in an ordinary step
_LOOKED_INTO = 3  # spikes, the largest: each costs the derivatives of up to three rollouts
_CARRIERS = 5  # shares of a spike


@dataclass(frozen=True)
class SampleShare:
    """What one sample contributes to its optimizer step.

    Attributes:
        position: in the rollout.
        step: optimizer step within the rollout.
        share: its part of the step's Σ|∂loss/∂log π|.
        times_ordinary: the same, divided by 1 / number of samples in the step.
        largest: of its tokens' |∂loss/∂log π|.
    """

    position: int
    step: int
    share: float
    times_ordinary: float
    largest: float


@dataclass(frozen=True)
class Gradient:
    """∂loss/∂log π of every token, and what it comes to by sample.

    Attributes:
        tokens: rollout position -> derivative by the log-prob of each response token, float64, shape ``(response,)``.
        shares: per sample, the largest share first.
        unknown: why samples are left out -> their positions; all of them where the loss is not known.
        notes: what the loss has besides.
    """

    tokens: Mapping[int, torch.Tensor]
    shares: tuple[SampleShare, ...]
    unknown: Mapping[str, tuple[int, ...]]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "n_samples": len(self.shares),
            "samples": [asdict(share) for share in self.shares[:_SHOWN]],
            "unknown": [{"reason": reason, "samples": list(samples)} for reason, samples in self.unknown.items()],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class _Seen:
    """What the loss saw of one sample; each tensor has shape ``(response,)``."""

    position: int
    step: int
    new: torch.Tensor
    old: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    denominator: float
    sample: Mapping[str, Any]


def loss_gradient(pair: ReadPair, arguments: Mapping[str, Any] | None = None) -> Gradient:
    """Differentiate slime's policy loss for one rollout.

    Args:
        pair: both sides.
        arguments: slime's, for dumps without provenance; they win over what provenance records.
    """
    known = {**pair.arguments, **(arguments or {})}
    everyone = tuple(one.position for one in pair.joined.pairs)
    reason = _why_not(known)
    if reason is not None:
        return Gradient({}, (), {reason: everyone} if everyone else {})
    steps = _steps(pair)
    seen: list[_Seen] = []
    unknown: dict[str, list[int]] = defaultdict(list)
    for one in pair.joined.pairs:
        found = _seen(one, steps.get(one.position), pair, known)
        if isinstance(found, str):
            unknown[found].append(one.position)
        else:
            seen.append(found)
    sizes = _step_sizes(pair, seen, known)
    tokens: dict[int, torch.Tensor] = {}
    for one_seen in seen:
        derivative = _derivative(one_seen, known)
        if isinstance(derivative, str):
            unknown[derivative].append(one_seen.position)
            continue
        scale = sizes.get(one_seen.step)
        if scale is None:
            unknown["the dump does not say how many rollouts an optimizer step takes"].append(one_seen.position)
            continue
        tokens[one_seen.position] = derivative / scale
    notes = []
    if number(known.get("entropy_coef")):
        notes.append("the loss has an entropy bonus, which is not in these derivatives")
    by_step = {one.position: one.step for one in seen}
    return Gradient(tokens, _shares(tokens, by_step), {why: tuple(at) for why, at in unknown.items()}, tuple(notes))


def _why_not(arguments: Mapping[str, Any]) -> str | None:
    if "advantage_estimator" not in arguments:
        return "the train dump does not record slime's arguments"
    if arguments.get("loss_type", "policy_loss") != "policy_loss":
        return f"the loss is {arguments['loss_type']}, not slime's policy loss"
    if arguments.get("custom_pg_loss_reducer_function_path"):
        return "the run has a loss reducer of its own"
    custom = str(arguments.get("custom_tis_function_path") or "")
    if _corrects(arguments) and custom and not custom.endswith("icepop_function"):
        return f"the run corrects its loss with {custom}"
    return None


def _corrects(arguments: Mapping[str, Any]) -> bool:
    """slime multiplies the loss by its weights with ``--get-mismatch-metrics`` alone, too."""
    return truth(arguments.get("use_tis")) or truth(arguments.get("get_mismatch_metrics"))


def _steps(pair: ReadPair) -> dict[int, int]:
    """Rollout position -> optimizer step within the rollout, for the samples of which the layout tells."""
    found: dict[int, int] = {}
    for shard in pair.train.dp_shards:
        positions = as_ints(shard.get("partition"))
        counts, batches = as_ints(shard.get("num_microbatches")), as_list(shard.get("micro_batch_indices"))
        if positions is None:
            continue
        if counts is None or batches is None:
            batch = whole_number(pair.arguments.get("global_batch_size"))
            ranks = pair.provenance.data_parallel or len(pair.train.dp_shards)
            each = batch // ranks if batch else len(positions)
            found.update({position: n // max(1, each) for n, position in enumerate(positions)})
            continue
        ends = list(itertools.accumulate(counts))
        for n, batch_indices in enumerate(batches):
            for local in as_ints(batch_indices) or ():
                if 0 <= local < len(positions):
                    found[positions[local]] = bisect_right(ends, n)
    return found


def _seen(one: Pair, step: int | None, pair: ReadPair, arguments: Mapping[str, Any]) -> _Seen | str:
    sample = one.train
    advantages, mine = _floats(sample.get("advantages")), _floats(sample.get("log_probs"))
    rollout, mask = _floats(sample.get("rollout_log_probs")), integers(sample.get("loss_masks"))
    if advantages is None or mine is None or mask is None or not len(advantages) == len(mine) == len(mask):
        return "the dump lacks advantages, log-probs or the mask"
    if step is None:
        return "the layout does not say at which optimizer step the sample was trained"
    captured = pair.provenance.fields.get("log_probs") == "captured"
    if not captured and step > 0:
        return "trained after an optimizer step: its log-probs in the loss are not those in the dump"
    old = mine
    if truth(arguments.get("use_rollout_logprobs")):
        if rollout is None or len(rollout) != len(mine):
            return "the dump lacks training's copy of the rollout's log-probs"
        old = rollout
    summed = next((sample[name] for name in ("rollout_mask_sums", "group_mask_sums") if name in sample), None)
    total = number(summed) if summed is not None else float(mask.sum())
    if total is None:
        return "the sum of masks is no number"
    return _Seen(one.position, step, mine, old, (mask != 0).double(), advantages, max(1.0, total), sample)


def _step_sizes(pair: ReadPair, seen: Sequence[_Seen], arguments: Mapping[str, Any]) -> dict[int, float]:
    """What the sum over a step is divided by: its rollouts (samples up to v0.2.4), or its tokens."""
    if truth(arguments.get("calculate_per_token_loss")):
        tokens: dict[int, float] = defaultdict(float)
        for one in seen:
            tokens[one.step] += max(1.0, float(one.mask.sum()))
        return dict(tokens)
    for shard in pair.train.dp_shards:
        sizes = as_ints(shard.get("global_batch_sizes"))
        if sizes:
            return {step: float(size) for step, size in enumerate(sizes)}
        dynamic = whole_number(shard.get("dynamic_global_batch_size"))
        if dynamic:
            return {one.step: float(dynamic) for one in seen}
    size = whole_number(arguments.get("global_batch_size"))
    return {one.step: float(size) for one in seen} if size else {}


def _derivative(one: _Seen, arguments: Mapping[str, Any]) -> torch.Tensor | str:
    """∂/∂log π of the sample's term before the division by the step's size."""
    low, high = number(arguments.get("eps_clip")), number(arguments.get("eps_clip_high"))
    if low is None or high is None:
        return "the dump does not record eps_clip and eps_clip_high"
    estimator, advantages = arguments.get("advantage_estimator"), one.advantages
    per_sequence = estimator == "gspo"
    moved = one.new - one.old
    counted = max(1.0, float(one.mask.sum()))
    if per_sequence:
        moved = torch.full_like(moved, float((moved * one.mask).sum()) / counted)
    ratio = moved.exp()
    bound = number(arguments.get("eps_clip_c"))
    if bound is not None and bool(((advantages < 0) & (ratio > bound) & (one.mask > 0)).any()):
        return "eps_clip_c would bound a token here, and only some releases of slime apply it"
    if estimator == "cispo":
        slope = -ratio.clamp(1 - low, 1 + high) * advantages
    else:
        # max(-r A, -clip(r) A): the second, which has no slope, is the larger one beyond a bound on A's side.
        bounded = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
        slope = (-ratio * advantages).masked_fill(bounded, 0.0)
    weighted = slope * _weights(one, arguments) * one.mask / _divisor(one, arguments)
    if per_sequence:
        weighted = weighted.sum() * one.mask / counted
    if truth(arguments.get("use_kl_loss")):
        penalty = _kl_slope(one, arguments)
        if isinstance(penalty, str):
            return penalty
        coefficient = number(arguments.get("kl_loss_coef")) or 0.0
        weighted = weighted + coefficient * penalty * one.mask / _divisor(one, arguments)
    return weighted


def _divisor(one: _Seen, arguments: Mapping[str, Any]) -> float:
    return 1.0 if truth(arguments.get("calculate_per_token_loss")) else one.denominator


def _weights(one: _Seen, arguments: Mapping[str, Any]) -> torch.Tensor:
    """What slime multiplies the policy term by: OPSM's mask and the correction of the mismatch."""
    weight = torch.ones_like(one.new)
    if truth(arguments.get("use_opsm")):
        moved = float(((one.old - one.new) * one.mask).sum()) / max(1.0, float(one.mask.sum()))
        if moved > (number(arguments.get("opsm_delta")) or 0.0):
            weight = weight.masked_fill(one.advantages < 0, 0.0)
    rollout = _floats(one.sample.get("rollout_log_probs"))
    if _corrects(arguments) and rollout is not None:
        ratio = (one.new - rollout).exp()
        low, high = number(arguments.get("tis_clip_low")) or 0.0, number(arguments.get("tis_clip"))
        high = math.inf if high is None else high
        if str(arguments.get("custom_tis_function_path") or "").endswith("icepop_function"):
            weight = weight * ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
        else:
            weight = weight * ratio.clamp(low, high)
    return weight


def _kl_slope(one: _Seen, arguments: Mapping[str, Any]) -> torch.Tensor | str:
    reference = _floats(one.sample.get("ref_log_probs"))
    if reference is None or len(reference) != len(one.new):
        return "the loss has a KL term, and the dump lacks the reference's log-probs"
    kind = str(arguments.get("kl_loss_type", "k1"))
    ratio = one.new - reference
    if kind == "k1":
        value, slope = ratio, torch.ones_like(ratio)
    elif kind == "k2":
        value, slope = ratio**2 / 2, ratio
    elif kind in ("k3", "low_var_kl"):
        value, slope = (-ratio).exp() - 1 + ratio, 1 - (-ratio).exp()
    else:
        return f"the loss has a KL term of a kind that is not known here: {kind}"
    if truth(arguments.get("use_unbiased_kl")):
        moved = (one.new - one.old).exp()
        value, slope = moved * value, moved * (value + slope)
    return slope.masked_fill(value.abs() > 10, 0.0) if kind == "low_var_kl" else slope


def _shares(tokens: Mapping[int, torch.Tensor], step_of: Mapping[int, int]) -> tuple[SampleShare, ...]:
    sizes = {position: float(values.abs().sum()) for position, values in tokens.items()}
    totals: dict[int, float] = defaultdict(float)
    members: dict[int, int] = defaultdict(int)
    for position, size in sizes.items():
        totals[step_of[position]] += size
        members[step_of[position]] += 1
    found = []
    for position, size in sizes.items():
        step = step_of[position]
        share = size / totals[step] if totals[step] else 0.0
        largest = float(tokens[position].abs().max()) if len(tokens[position]) else 0.0
        found.append(SampleShare(position, step, share, share * members[step], largest))
    return tuple(sorted(found, key=lambda one: (-one.share, one.position)))


def _floats(value: Any) -> torch.Tensor | None:
    found = log_probs(value)
    return found[0].double() if found is not None else None


# --- optimizer steps whose gradient norm stands out ---


@dataclass(frozen=True)
class _Spike:
    rollout: int
    step: int
    norm: float
    ordinary: float

    @property
    def times(self) -> float:
        return self.norm / self.ordinary if math.isfinite(self.norm) else math.inf


def step_norms(provenance: Provenance) -> dict[int, float]:
    """Optimizer step within the rollout -> the norm of its gradient, as slime returned it."""
    found = {}
    for one in as_list(provenance.record.get("steps")) or ():
        if isinstance(one, Mapping):
            step, norm = whole_number(one.get("step")), number(one.get("grad_norm"))
            if step is not None and norm is not None:
                found[step] = norm
    return found


def spikes(
    norms: Sequence[Mapping[int, float]], names: Sequence[str], gradient_of: Callable[[int], Gradient]
) -> list[Finding]:
    """The steps that stand out, each with the samples that carry it; the largest first.

    They are told beside the verdict and do not decide it: the two sides of a dump may agree while a step is large.

    Args:
        norms: :func:`step_norms` of each rollout, in order.
        names: of the rollouts.
        gradient_of: the derivatives of one of them, by its place; asked only where a step stands out.
    """
    found = _standing_out(norms)
    known: dict[int, Gradient] = {}

    def gradient(rollout: int) -> Gradient:
        if rollout not in known:
            known[rollout] = gradient_of(rollout)
        return known[rollout]

    told = []
    for one in found[:_LOOKED_INTO]:
        near = [i for i in (one.rollout, one.rollout - 1, one.rollout + 1) if 0 <= i < len(norms)]
        others = [
            size
            for i in near
            for size in _sizes(gradient(i), without={spike.step for spike in found if spike.rollout == i}).values()
        ]
        told.append(_finding(one, names[one.rollout], gradient(one.rollout), max(others, default=None)))
    return told


def _standing_out(norms: Sequence[Mapping[int, float]]) -> list[_Spike]:
    series = [(i, step, norm) for i, steps in enumerate(norms) for step, norm in sorted(steps.items())]
    found = []
    for n, (i, step, norm) in enumerate(series):
        near = [value for _, _, value in series[max(0, n - _NEAR) : n] + series[n + 1 : n + 1 + _NEAR]]
        logs = [math.log(value) for value in near if 0 < value < math.inf]
        if len(logs) < _FEWEST:
            continue
        middle = median(logs)
        scatter = 1.4826 * median(abs(value - middle) for value in logs)
        if not math.isfinite(norm) or (
            norm > 0 and math.log(norm) - middle > max(math.log(_TIMES), _SCATTER * scatter)
        ):
            found.append(_Spike(i, step, norm, math.exp(middle)))
    return sorted(found, key=lambda one: -one.times)


def _sizes(gradient: Gradient, *, without: set[int]) -> dict[int, float]:
    """Σ|∂loss/∂log π| of each sample of the other steps."""
    kept = (one.position for one in gradient.shares if one.step not in without)
    return {position: float(gradient.tokens[position].abs().sum()) for position in kept}


def _finding(spike: _Spike, name: str, gradient: Gradient, ordinary: float | None) -> Finding:
    shares = [one for one in gradient.shares if one.step == spike.step]
    times = f", {spike.times:.3g} times that of the steps around it" if math.isfinite(spike.times) else ""
    message = f"{name}, optimizer step {spike.step}: grad_norm is {spike.norm:.3g}{times}."
    carrying: list[SampleShare] = []
    if not shares:
        reason = next(iter(gradient.unknown), "the dump holds no sample of it")
        message += f" Which samples carry it is not known: {reason}."
    elif ordinary is None:
        message += f" No ordinary step nearby is known to hold its samples against; the largest: {_told(shares[:1])}."
    else:
        sizes = {one.position: float(gradient.tokens[one.position].abs().sum()) for one in shares}
        carrying = [one for one in shares if not sizes[one.position] <= _CARRIES * ordinary]
        if 2 * len(carrying) > len(shares):
            message += (
                f" No sample carries more than its share: {len(carrying)} of {len(shares)} pull more than any sample "
                "of the steps around it."
            )
            carrying = []
        elif carrying:
            told = _told(carrying)
            message += f" {told[0].upper()}{told[1:]}: more than any sample of the steps around it."
        else:
            message += f" No sample carries more than its share; the largest: {_told(shares[:1])}."
    return Finding(
        SPIKE,
        message,
        tuple(sorted(one.position for one in carrying)),
        {
            "rollout": spike.rollout,
            "step": spike.step,
            "grad_norm": spike.norm,
            "ordinary": spike.ordinary,
            "shares": [asdict(one) for one in (carrying or shares)[:_CARRIERS]],
        },
    )


def _told(shares: Sequence[SampleShare]) -> str:
    together = sum(one.share for one in shares)
    if len(shares) == 1:
        return (
            f"position {shares[0].position} carries {together:.3g} of the step's Σ|∂loss/∂log π|, "
            f"{shares[0].times_ordinary:.3g} times an equal part"
        )
    return f"positions {show([one.position for one in shares])} carry {together:.3g} of the step's Σ|∂loss/∂log π|"
