"""Which tokens and samples moved the model: the derivative of slime's policy loss by each token's log-prob.

The derivative is exact where the dump holds what the loss saw; where it does not, :attr:`Gradient.unknown` says which
samples are left out and why. The entropy bonus depends on whole distributions, which no dump has, and is not in it.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slime_instrument._analysis.read_pair import ReadPair
from slime_instrument._format.join import Pair
from slime_instrument._format.values import as_ints, as_list, integers, log_probs, number, truth, whole_number

_SHOWN = 20


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

    def as_dict(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "step": self.step,
            "share": self.share,
            "times_ordinary": self.times_ordinary,
            "largest": self.largest,
        }


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
            "samples": [share.as_dict() for share in self.shares[:_SHOWN]],
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
    recorded = pair.provenance.record.get("arguments")
    known = {**(recorded if isinstance(recorded, Mapping) else {}), **(arguments or {})}
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
            arguments = pair.provenance.record.get("arguments")
            named = arguments if isinstance(arguments, Mapping) else {}
            batch = whole_number(named.get("global_batch_size"))
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
