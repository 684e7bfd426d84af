"""Corrections of the mismatch between training and rollout, as the frameworks compute them.

Each rule takes the tokens of one rollout and says what the token's loss is multiplied by and which tokens it takes out.
Parameters carry the framework's own names, so that what helped here can be copied into its configuration. Quirks are
part of a formula and kept: where a framework clamps an exponent before it sums, divides by a count plus 1e-8, turns an
overflow into weight 0 or lets a NaN through, so does the rule. ``tests/analysis/test_corrections.py`` holds the rules
against the frameworks' own functions, except those of SkyRL, OpenRLHF and AReaL and verl's IcePop, which were written
after their source.

In this module π is the probability that training gave a token before the update, μ the engine's, δ = log π - log μ, and
ρ = exp δ their ratio.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from slime_instrument._analysis.drift import turns
from slime_instrument._errors import InstrumentError, five_parts

Value = float | str | bool | None
"""A parameter of a rule."""

_SAFETY = 20.0  # several frameworks clamp exponents to this, either way


class UnknownPolicy(InstrumentError, ValueError):
    """A policy, a parameter or a value that means nothing."""


@dataclass(frozen=True)
class Batch:
    """The response tokens of the sequences of one rollout, one after another. ``N`` counts tokens, ``S`` sequences.

    Attributes:
        train, rollout: log-probs, shape ``(N,)``, of one floating type; rules compute in that type, so that what
            overflows in the framework's float32 overflows here.
        mask: which tokens the loss counts, bool, shape ``(N,)``.
        lengths: tokens of each sequence, int64, shape ``(S,)``.
        advantages: shape ``(N,)``; None where the dump has none.
    """

    train: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor
    lengths: torch.Tensor
    advantages: torch.Tensor | None = None

    @cached_property
    def delta(self) -> torch.Tensor:
        """log π - log μ, shape ``(N,)``."""
        return self.train - self.rollout

    @cached_property
    def counts(self) -> torch.Tensor:
        """Tokens of each sequence that count, int64, shape ``(S,)``."""
        return self._segment_sums(self.mask).long()

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of each sequence's ``values`` where the mask is 1, shape ``(S,)``. What is masked cannot leak."""
        return self._segment_sums(values.masked_fill(~self.mask, 0.0)).to(values.dtype)

    def products(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of each sequence's ``values`` times the mask, shape ``(S,)``: a NaN or inf leaks out of masked tokens."""
        return self._segment_sums(values * self.mask).to(values.dtype)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Largest of each sequence's ``values`` where the mask is 1, shape ``(S,)``; 0 where it has none."""
        lowest = values.masked_fill(~self.mask, -torch.inf)
        found: torch.Tensor = torch.segment_reduce(lowest, "max", lengths=self.lengths, unsafe=True, initial=-torch.inf)
        return found.masked_fill(found == -torch.inf, 0.0)

    def spread(self, per_sequence: torch.Tensor) -> torch.Tensor:
        """One value per sequence as one per token: ``(S,)`` to ``(N,)``."""
        return per_sequence.repeat_interleave(self.lengths)

    def mean(self, values: torch.Tensor, epsilon: float = 0.0) -> float:
        """Mean of ``values`` over all tokens that count; ``epsilon`` is added to their number."""
        n = int(self.counts.sum())
        return float(values.double().masked_fill(~self.mask, 0.0).sum()) / (n + epsilon) if n else 0.0

    def _segment_sums(self, values: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = torch.segment_reduce(values.double(), "sum", lengths=self.lengths, unsafe=True)
        return summed


@dataclass(frozen=True)
class Outcome:
    """What a rule does to each token of a batch; meaningless where the mask is 0.

    Attributes:
        weight: what the token's loss is multiplied by, shape ``(N,)``.
        kept: tokens that stay in the loss, bool, shape ``(N,)``.
        clipped: tokens whose weight was set to a bound, bool, shape ``(N,)``.
        reported: numbers that the framework itself logs, under its names and by its definitions.
    """

    weight: torch.Tensor
    kept: torch.Tensor
    clipped: torch.Tensor
    reported: Mapping[str, float] = field(default_factory=dict)

    @property
    def effective(self) -> torch.Tensor:
        """Weight with what was taken out at 0, shape ``(N,)``."""
        return self.weight.masked_fill(~self.kept, 0.0)


Rule = Callable[..., Outcome]


@dataclass(frozen=True)
class Policy:
    """A rule with its parameters.

    Attributes:
        name: of the preset that it came from.
        framework: whose formula it is.
        parameters: by the framework's names.
        rule: called as ``rule(batch, **parameters)``.
        on_by_default: whether the framework applies it unasked.
        needs_advantages: whether the rule looks at them.
    """

    name: str
    framework: str
    rule: Rule
    parameters: Mapping[str, Value]
    on_by_default: bool = False
    needs_advantages: bool = False

    def apply(self, batch: Batch) -> Outcome:
        return self.rule(batch, **self.parameters)

    def changed(self, **parameters: Value) -> Policy:
        """The same with other values of some parameters."""
        return replace(self, parameters={**self.parameters, **parameters})


def _outcome(
    weight: torch.Tensor,
    *,
    clipped: torch.Tensor | None = None,
    rejected: torch.Tensor | None = None,
    reported: Mapping[str, float] | None = None,
) -> Outcome:
    kept = weight != 0
    if rejected is not None:
        kept = kept & ~rejected
    return Outcome(weight, kept, torch.zeros_like(kept) if clipped is None else clipped & kept, reported or {})


def _within(values: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """Where values lie between the bounds, ends included. A NaN lies nowhere."""
    inside = values == values
    if low is not None:
        inside = inside & (values >= low)
    if high is not None:
        inside = inside & (values <= high)
    return inside


def _bounds(spec: float | str) -> tuple[float | None, float]:
    """``"0.5_2.0"`` as (0.5, 2.0), ``2.0`` as (None, 2.0)."""
    low, _, high = str(spec).rpartition("_")
    return (float(low) if low else None), float(high)


def _one_of(name: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        raise _bad(name, value, ", ".join(map(str, known)))


def _bad(name: str, found: object, expected: str) -> UnknownPolicy:
    return UnknownPolicy(
        five_parts(
            name,
            expected=expected,
            found=repr(found),
            follows="Nothing was computed.",
            next_step="slime-instrument what-if --list shows every policy with its parameters.",
        )
    )


# --- no correction, and the plain ratio ---


def unchanged(batch: Batch) -> Outcome:
    """Weight 1: no correction."""
    return _outcome(torch.ones_like(batch.delta))


def plain_ratio(batch: Batch) -> Outcome:
    """Weight ρ without any bound."""
    return _outcome(batch.delta.exp())


# --- slime ---


def slime_tis(batch: Batch, *, tis_clip: float = 2.0, tis_clip_low: float = 0.0) -> Outcome:
    """slime's ``--use-tis``: ρ clamped to its two bounds."""
    ratio = batch.delta.exp()
    weight = ratio.clamp(min=tis_clip_low, max=tis_clip)
    return _outcome(weight, clipped=weight != ratio, reported=_slime_reports(batch, ratio, weight))


def slime_icepop(batch: Batch, *, tis_clip: float = 2.0, tis_clip_low: float = 0.0) -> Outcome:
    """slime's IcePop function: ρ between the bounds, else 0."""
    ratio = batch.delta.exp()
    weight = ratio.masked_fill(~_within(ratio, tis_clip_low, tis_clip), 0.0)
    return _outcome(weight, reported=_slime_reports(batch, ratio, weight))


def _slime_reports(batch: Batch, ratio: torch.Tensor, weight: torch.Tensor) -> dict[str, float]:
    """As with ``--calculate-per-token-loss``; without it slime takes a mean over rollouts of means over tokens."""
    return {
        "tis": batch.mean(ratio),
        "tis_clipfrac": batch.mean((weight != ratio).double()),
        "tis_abs": batch.mean((ratio - 1).abs()),
    }


def slime_opsm(batch: Batch, *, opsm_delta: float = 1e-4) -> Outcome:
    """slime's ``--use-opsm`` with ``--use-rollout-logprobs``: tokens with a negative advantage go where the sequence's
    mean of log μ - log π is above the threshold. (Without that flag slime measures how far training moved within the
    rollout, which is 0 at its first step.)"""
    moved = batch.products(batch.rollout - batch.train) / batch.counts.clamp(min=1)
    assert batch.advantages is not None
    rejected = (batch.advantages < 0) & batch.spread(moved > opsm_delta)
    return _outcome(torch.ones_like(batch.delta), rejected=rejected)


def mis(
    batch: Batch,
    *,
    tis_level: str = "token",
    tis_mode: str = "truncate",
    tis_lower_bound: float | None = 0.5,
    tis_upper_bound: float = 2.0,
    tis_batch_normalize: bool = True,
    use_rs: bool = True,
    rs_level: str = "token",
    rs_lower_bound: float | None = None,
    rs_upper_bound: float | None = None,
    rs_veto_threshold: float | None = 1e-4,
) -> Outcome:
    """``mis.py`` of slime's and miles' examples: weights by level and mode, rejection, veto, batch normalisation.

    The batch that it normalises over is the micro-batch that it is called with; here it is the rollout.
    """
    for name, level in (("tis_level", tis_level), ("rs_level", rs_level)):
        _one_of(name, level, ("token", "sequence", "geometric"))
    _one_of("tis_mode", tis_mode, ("truncate", "clip", "mask"))

    def log_ratio(level: str) -> torch.Tensor:
        if level == "token":
            return batch.delta
        summed = batch.products(batch.delta)
        return batch.spread(summed if level == "sequence" else summed / batch.counts.clamp(min=1))

    low = tis_lower_bound if tis_lower_bound is not None else 1.0 / tis_upper_bound
    ratio = log_ratio(tis_level).clamp(-_SAFETY, _SAFETY).exp()
    weight, rejected = ratio, torch.zeros_like(batch.mask)
    if tis_mode == "truncate":
        weight = ratio.clamp(0, tis_upper_bound)
    elif tis_mode == "clip":
        weight = ratio.clamp(low, tis_upper_bound)
    else:
        rejected = ~_within(ratio, low, tis_upper_bound)
    clipped = weight != ratio
    if use_rs:
        rs_low = rs_lower_bound if rs_lower_bound is not None else low
        rs_high = rs_upper_bound if rs_upper_bound is not None else tis_upper_bound
        rejected = rejected | ~_within(log_ratio(rs_level).clamp(-_SAFETY, _SAFETY).exp(), rs_low, rs_high)
        if rs_veto_threshold is not None:
            bad = (batch.delta < math.log(rs_veto_threshold)) & batch.mask
            rejected = rejected | batch.spread(batch.sums(bad.double()) > 0)
    if tis_batch_normalize:
        summed = batch.products(weight).double()
        if tis_level == "token":
            mean = float(summed.sum()) / max(1, int(batch.counts.sum()))
        elif tis_level == "sequence":
            mean = float((summed / batch.counts.clamp(min=1)).mean())
        else:
            raise _bad("tis_batch_normalize", True, "False with tis_level geometric, which mis.py cannot normalise")
        if mean > 1e-8:
            weight = weight / mean
    return _outcome(weight, clipped=clipped, rejected=rejected)


# --- verl ---


def verl(
    batch: Batch,
    *,
    rollout_is: str | None = None,
    rollout_is_threshold: float | str = 2.0,
    rollout_is_batch_normalize: bool = False,
    rollout_rs: str | None = None,
    rollout_rs_threshold: float | str | None = None,
) -> Outcome:
    """verl's ``rollout_correction``: importance weights, then rejection by any number of divergences.

    A threshold ``"lo_hi"`` of the weights is IcePop, which newer states of verl have.
    """
    _one_of("rollout_is", rollout_is, (None, "token", "sequence"))
    weight = torch.ones_like(batch.delta)
    clipped = torch.zeros_like(batch.mask)
    reported: dict[str, float] = {}
    if rollout_is is not None:
        low, high = _bounds(rollout_is_threshold)
        summed = batch.delta if rollout_is == "token" else batch.spread(batch.sums(batch.delta))
        ratio = summed.clamp(-_SAFETY, _SAFETY).exp() * batch.mask
        if low is None:
            weight, clipped = ratio.clamp(max=high), ratio > high
        else:
            weight = ratio.masked_fill(~_within(ratio, low, high), 0.0)
        reported = _verl_reports(batch, ratio, summed, rollout_is, high)
        if rollout_is_batch_normalize:
            if rollout_is == "token":
                mean = batch.mean(weight, 1e-8)
            else:
                present = batch.counts > 0
                each = batch.sums(weight).double() / (batch.counts + 1e-8)
                mean = float(each[present].sum()) / max(int(present.sum()), 1e-8)
            if mean > 1e-8:
                weight = weight / mean
    rejected = torch.zeros_like(batch.mask)
    if rollout_rs is not None:
        for option, low, high in _verl_thresholds(rollout_rs, rollout_rs_threshold):
            rejected = rejected | ~_within(_verl_divergence(batch, option), low, high)
        gone = rejected & batch.mask
        reported["rollout_rs_masked_fraction"] = batch.mean(gone.double(), 1e-8)
        touched = batch.sums(gone.double()) > 0
        reported["rollout_rs_seq_masked_fraction"] = float(touched.double().mean())
    return _outcome(weight, clipped=clipped, rejected=rejected, reported=reported)


def _verl_reports(
    batch: Batch, ratio: torch.Tensor, log_ratio: torch.Tensor, level: str, high: float
) -> dict[str, float]:
    """Taken before the weights are truncated, and the effective sample size with weights clamped to [1/C, C]."""
    clamped = ratio.double().clamp(1.0 / high, high)
    normalized = clamped / (batch.mean(clamped, 1e-8) + 1e-8)
    squared = batch.mean(normalized.square(), 1e-8)
    found = {
        "rollout_is_mean": batch.mean(ratio, 1e-8),
        "rollout_is_eff_sample_size": 1.0 / squared if squared else 0.0,
    }
    if level == "token":
        found["rollout_is_ratio_fraction_high"] = batch.mean((ratio > high).double(), 1e-8)
        found["rollout_is_ratio_fraction_low"] = batch.mean((ratio < 1.0 / high).double(), 1e-8)
    else:  # over all sequences, those without a token included
        first = (batch.lengths.cumsum(0) - batch.lengths)[batch.lengths > 0]
        each = torch.zeros(len(batch.lengths), dtype=log_ratio.dtype)
        each[batch.lengths > 0] = log_ratio[first]
        found["rollout_is_ratio_fraction_high"] = float((each > math.log(high)).double().mean())
        found["rollout_is_ratio_fraction_low"] = float((each < -math.log(high)).double().mean())
    return found


def _verl_thresholds(options: str, thresholds: float | str | None) -> list[tuple[str, float | None, float]]:
    names = list(dict.fromkeys(one.strip() for one in options.split(",") if one.strip()))
    specs = [one.strip() for one in str(thresholds).split(",") if one.strip()] if thresholds is not None else []
    if len(specs) == 1:
        specs *= len(names)
    if not names or len(specs) != len(names):
        raise _bad("rollout_rs_threshold", thresholds, f"one threshold, or one for each of {options}")
    found: list[tuple[str, float | None, float]] = []
    for name, spec in zip(names, specs, strict=True):
        try:
            low, high = _bounds(spec)
        except ValueError:
            raise _bad("rollout_rs_threshold", spec, "HIGH, or LOW_HIGH for a k1 divergence") from None
        if name.endswith("k1"):
            found.append((name, math.log(low if low is not None else 1.0 / high), math.log(high)))
        elif low is None:
            found.append((name, None, high))
        else:
            raise _bad("rollout_rs_threshold", spec, f"one upper bound for {name}")
    return found


def _verl_divergence(batch: Batch, option: str) -> torch.Tensor:
    """One value per token. k1 is -δ: a bound on it is one on 1/ρ."""
    delta = batch.delta.clamp(-_SAFETY, _SAFETY)
    level, _, kind = option.rpartition("_")
    divergences = {"k1": lambda: -delta, "k2": lambda: 0.5 * delta**2, "k3": lambda: delta.exp() - 1.0 - delta}
    if kind not in divergences or level not in ("token", "seq_sum", "seq_mean", "seq_max"):
        raise _bad("rollout_rs", option, "token_, seq_sum_, seq_mean_ or seq_max_ with k1, k2 or k3")
    each = divergences[kind]()
    if level == "token":
        return each
    if level == "seq_max":
        return batch.spread(batch.largest(each))
    summed = batch.sums(each)
    return batch.spread(summed if level == "seq_sum" else summed / (batch.counts + 1e-8))


# --- NeMo-RL ---


def nemo_rl(
    batch: Batch,
    *,
    truncated_importance_sampling_type: str | None = None,
    truncated_importance_sampling_ratio: float = 2.0,
    truncated_importance_sampling_ratio_min: float | None = None,
    sequence_level_importance_ratios: bool = False,
) -> Outcome:
    """NeMo-RL's ``use_importance_sampling_correction``. A weight that overflows or is NaN becomes 0, not the bound."""
    kind, high = truncated_importance_sampling_type, truncated_importance_sampling_ratio
    low = truncated_importance_sampling_ratio_min
    _one_of("truncated_importance_sampling_type", kind, (None, "tis", "icepop", "seq-mask-tis"))
    summed = batch.spread(batch.products(batch.delta)) if sequence_level_importance_ratios else batch.delta
    ratio = summed.exp().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    reported = {"sampling_importance_ratio": batch.mean(ratio, 1e-8)}
    if kind is None:
        return _outcome(ratio, reported=reported)
    if kind == "tis":
        least = low if low is not None else 0.0
        outside = (ratio > high) | (ratio < least)
        weight = ratio.clamp(least, high)
        fraction = batch.mean(outside.double(), 1e-8)
        clipped = weight != ratio
    elif kind == "icepop":
        inside = _within(ratio, low, high)
        weight = ratio.masked_fill(~inside, 0.0)
        fraction = batch.mean((~inside).double(), 1e-8)
        clipped = torch.zeros_like(inside)
    else:
        finite = batch.delta.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        inside = _within((batch.products(finite) / (batch.counts + 1e-8)).exp(), low, high)
        weight = ratio * batch.spread(inside)
        fraction = float((~inside).double().sum() / (len(inside) + 1e-8))
        clipped = torch.zeros_like(batch.mask)
    reported = {"is_oob_ratio": fraction, "sampling_importance_ratio": batch.mean(weight, 1e-8)}
    return _outcome(weight, clipped=clipped, reported=reported)


# --- prime-rl ---


def prime_rl_dppo(batch: Batch, *, dppo_mask_high: float = 0.2, dppo_mask_low: float = 0.2) -> Outcome:
    """prime-rl's default loss: weight ρ; a token goes whose probability already moved too far in the direction that
    its advantage pushes. An advantage of 0 counts as negative."""
    assert batch.advantages is not None
    moved = batch.train.exp() - batch.rollout.exp()
    up = batch.advantages > 0
    rejected = torch.where(up, moved > dppo_mask_high, moved < -dppo_mask_low)
    high, low = rejected & up, rejected & (batch.advantages < 0)
    reported = {
        "is_masked": batch.mean(rejected.double()),
        "is_masked_high": batch.mean(high.double()),
        "is_masked_low": batch.mean(low.double()),
    }
    return _outcome(batch.delta.exp(), rejected=rejected, reported=reported)


def prime_rl_ipo(batch: Batch, *, ipo_threshold: float = 0.1) -> Outcome:
    """prime-rl's IPO loss: weight ρ; a token goes whose probability moved by more than the threshold, either way."""
    rejected = (batch.train.exp() - batch.rollout.exp()).abs() > ipo_threshold
    return _outcome(batch.delta.exp(), rejected=rejected, reported={"is_masked": batch.mean(rejected.double())})


# --- ROLL ---


def roll(
    batch: Batch,
    *,
    weight_type: str | None = None,
    upper_bound: float | None = 1.2,
    agg_type: str | None = None,
    ratio_low: float | None = 0.8,
    ratio_high: float | None = 1.2,
    diff_low: float | None = None,
    diff_high: float | None = None,
) -> Outcome:
    """ROLL's ``train_infer_correction``: one weight, one filter by ratio or difference of probabilities. No exponent is
    clamped: a sequence's ratio may overflow, and then it is the upper bound."""
    levels = ("token", "segment", "geometric", "sequence")
    weight, clipped = torch.ones_like(batch.delta), torch.zeros_like(batch.mask)
    reported: dict[str, float] = {}
    if weight_type is not None:
        _one_of("weight_type", weight_type, levels)
        weight = _roll_level(batch, batch.delta, weight_type).exp()
        if upper_bound is not None:
            clipped = weight > upper_bound
            if weight_type in ("token", "segment"):
                # ROLL's token mean does not mask; for the other levels it counts padding too, which no dump has.
                everywhere = float(clipped.double().sum())
                reported["actor/is_weight_clipfrac@sum"] = everywhere / max(1, int(batch.counts.sum()))
            weight = weight.clamp(0.0, upper_bound)
    rejected = torch.zeros_like(batch.mask)
    if agg_type is not None:
        _one_of("agg_type", agg_type, levels)
        if ratio_low is not None or ratio_high is not None:
            rejected = rejected | ~_within(_roll_level(batch, batch.delta, agg_type).exp(), ratio_low, ratio_high)
        if diff_low is not None or diff_high is not None:
            moved = _roll_level(batch, batch.train.exp() - batch.rollout.exp(), agg_type)
            rejected = rejected | ~_within(moved, diff_low, diff_high)
        reported["actor/train_infer_final_mask_mean"] = batch.mean((~rejected).double(), 1e-8)
    return _outcome(weight, clipped=clipped, rejected=rejected, reported=reported)


def _roll_level(batch: Batch, values: torch.Tensor, level: str) -> torch.Tensor:
    if level == "token":
        return values
    if level == "segment":
        return _roll_segments(batch, values)
    summed = batch.products(values).masked_fill(batch.counts == 0, 0.0)
    return batch.spread(summed if level == "sequence" else summed / (batch.counts + 1e-8))


def _roll_segments(batch: Batch, values: torch.Tensor) -> torch.Tensor:
    """Mean over each contiguous run of mask 1; 0 where the mask is 0."""
    result = torch.zeros_like(values)
    if not bool(batch.mask.any()):
        return result
    numbered = batch.spread(torch.arange(len(batch.lengths))) * (len(values) + 1) + turns(batch.mask, batch.lengths)
    numbers = numbered[batch.mask]
    run = (numbers.diff(prepend=numbers[:1]) != 0).cumsum(0)
    counts = torch.bincount(run)
    chosen = values[batch.mask].double()
    means = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, run, chosen) / (counts + 1e-8)
    result[batch.mask] = means[run].to(values.dtype)
    return result


# --- TRL ---


def trl(
    batch: Batch,
    *,
    vllm_importance_sampling_mode: str = "sequence_mask",
    vllm_importance_sampling_clip_max: float | None = 3.0,
    vllm_importance_sampling_clip_min: float | None = None,
) -> Outcome:
    """TRL's ``vllm_importance_sampling_correction``."""
    mode = vllm_importance_sampling_mode
    high, low = vllm_importance_sampling_clip_max, vllm_importance_sampling_clip_min
    _one_of(
        "vllm_importance_sampling_mode",
        mode,
        ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    by_sequence = mode.startswith("sequence")
    if by_sequence:
        each = batch.products(batch.delta).exp()
        ratio = batch.spread(each)
    else:
        each = ratio = (batch.delta * batch.mask).exp()
    if mode.endswith("truncate"):
        bounded, weight = _clamp(each, low, high), _clamp(ratio, low, high)
        clipped = weight != ratio
    else:
        # Written as TRL does: neither below nor above. A NaN is neither, and stays.
        outside = _outside(each, low, high)
        bounded = each.masked_fill(outside, 0.0)
        weight = ratio.masked_fill(_outside(ratio, low, high), 0.0)
        clipped = torch.zeros_like(batch.mask)
    counted = bounded if by_sequence else bounded[batch.mask]
    prefix = "sampling/importance_sampling_ratio"
    reported = {
        f"{prefix}/min": float(counted.min()) if len(counted) else 0.0,
        f"{prefix}/mean": float(counted.double().mean()) if len(counted) else 0.0,
        f"{prefix}/max": float(counted.max()) if len(counted) else 0.0,
    }
    return _outcome(weight, clipped=clipped, reported=reported)


def _clamp(values: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    return values.clamp(-torch.inf if low is None else low, torch.inf if high is None else high)


def _outside(values: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    """Where values lie beyond a bound. A NaN does not."""
    return (values < (-torch.inf if low is None else low)) | (values > (torch.inf if high is None else high))


# --- read in the frameworks' sources; not held against their functions ---


def skyrl(
    batch: Batch,
    *,
    tis_ratio_type: str | None = None,
    token_tis_ratio_clip_high: float = 2.0,
    sequence_tis_ratio_clip_high: float = 5.0,
    sequence_mask_metric: str | None = None,
    geo_mask_low: float = 0.99,
    geo_mask_high: float = 1.01,
    product_mask_low: float = 0.5,
    product_mask_high: float = 2.0,
    outlier_token_is_threshold_low: float | None = None,
    outlier_token_is_threshold_high: float | None = None,
    token_mask_is_threshold_low: float | None = None,
    token_mask_is_threshold_high: float | None = None,
) -> Outcome:
    """SkyRL's ``off_policy_correction``. What one filter takes out is not in the sums of the next."""
    _one_of("tis_ratio_type", tis_ratio_type, (None, "token", "sequence"))
    _one_of("sequence_mask_metric", sequence_mask_metric, (None, "geometric", "product"))
    ratio = batch.delta.clamp(-_SAFETY, _SAFETY).exp()
    left = batch
    if outlier_token_is_threshold_low is not None or outlier_token_is_threshold_high is not None:
        outlier = _outside(ratio, outlier_token_is_threshold_low, outlier_token_is_threshold_high) & left.mask
        left = replace(left, mask=left.mask & ~left.spread(left.sums(outlier.double()) > 0))
    if token_mask_is_threshold_low is not None and token_mask_is_threshold_high is not None:
        left = replace(left, mask=left.mask & _within(ratio, token_mask_is_threshold_low, token_mask_is_threshold_high))
    weight, clipped = torch.ones_like(ratio), torch.zeros_like(batch.mask)
    if tis_ratio_type is not None:
        if tis_ratio_type == "sequence":
            ratio = left.spread(left.products(left.delta)).clamp(-_SAFETY, _SAFETY).exp()
        high = token_tis_ratio_clip_high if tis_ratio_type == "token" else sequence_tis_ratio_clip_high
        weight, clipped = ratio.clamp(max=high), ratio > high
    if sequence_mask_metric is not None:
        summed = left.products(left.delta)
        if sequence_mask_metric == "geometric":
            summed, low, high = summed / left.counts.clamp(min=1), geo_mask_low, geo_mask_high
        else:
            low, high = product_mask_low, product_mask_high
        outside = _outside(summed.clamp(-_SAFETY, _SAFETY).exp(), low, high)
        left = replace(left, mask=left.mask & ~left.spread(outside))
    return _outcome(weight, clipped=clipped, rejected=~left.mask)


def openrlhf(
    batch: Batch, *, vllm_is_correction_type: str = "tis", low_threshold: float = 0.5, high_threshold: float = 5.0
) -> Outcome:
    """OpenRLHF's ``enable_vllm_is_correction``. seq-mask-tis masks by the geometric mean and bounds no weight."""
    _one_of("vllm_is_correction_type", vllm_is_correction_type, ("tis", "icepop", "seq-mask-tis"))
    ratio = batch.delta.exp()
    if vllm_is_correction_type == "tis":
        weight = ratio.clamp(low_threshold, high_threshold)
        return _outcome(weight, clipped=weight != ratio)
    judged = ratio
    if vllm_is_correction_type == "seq-mask-tis":
        judged = batch.spread((batch.products(batch.delta) / batch.counts).exp())
    return _outcome(ratio * _within(judged, low_threshold, high_threshold))


def areal(
    batch: Batch,
    *,
    level: str = "token",
    action: str = "mask",
    metric: str = "ratio",
    agg: str = "mean",
    upper: float = 5.0,
    lower: float | None = None,
) -> Outcome:
    """AReaL's ``rejection_sampling``. A δ that is not finite counts as 0; a sequence's ratio is its geometric mean."""
    _one_of("level", level, ("token", "sequence"))
    _one_of("action", action, ("mask", "clamp"))
    _one_of("agg", agg, ("sum", "mean", "max"))
    delta = batch.delta.float()
    delta = delta.masked_fill(~delta.isfinite(), 0.0)
    metrics = {
        "ratio": lambda: delta,  # aggregated as logarithms
        "kl_k1": lambda: batch.delta,
        "kl_k2": lambda: batch.delta**2 / 2.0,
        "kl_k3": lambda: (-batch.delta).exp() - 1.0 + batch.delta,
    }
    _one_of("metric", metric, tuple(metrics))
    judged, weight = metrics[metric](), delta.exp()
    if level == "sequence":
        counts = batch.counts.clamp(min=1)
        if metric == "ratio":
            weight = batch.spread((batch.sums(delta) / counts).exp())
        if agg == "max":
            judged = batch.spread(batch.largest(judged))
        else:
            judged = batch.spread(batch.sums(judged) if agg == "sum" else batch.sums(judged) / counts)
    if metric == "ratio":
        judged = judged.exp()
    inside = _within(judged, lower, upper)
    if action == "mask":
        return _outcome(weight, rejected=~inside)
    clamped = weight.clamp(lower if lower is not None else 0.0, upper)
    if level == "sequence":
        clamped = torch.where(inside, weight, clamped)
    return _outcome(clamped, clipped=clamped != weight)


# --- presets ---


def _preset(
    name: str,
    framework: str,
    rule: Rule,
    *,
    on_by_default: bool = False,
    needs_advantages: bool = False,
    **changed: Value,
) -> Policy:
    """The rule with its defaults, save those of its parameters that are ``changed``."""
    keywords = inspect.signature(rule).parameters.values()
    defaults = {one.name: one.default for one in keywords if one.kind is one.KEYWORD_ONLY}
    return Policy(name, framework, rule, {**defaults, **changed}, on_by_default, needs_advantages)


def _nemo_rl(name: str, kind: str, low: float, high: float) -> Policy:
    return _preset(
        name,
        "NeMo-RL",
        nemo_rl,
        truncated_importance_sampling_type=kind,
        truncated_importance_sampling_ratio=high,
        truncated_importance_sampling_ratio_min=low,
    )


def _verl_rs(name: str, option: str, threshold: float | str, level: str | None = None) -> Policy:
    return _preset(name, "verl", verl, rollout_is=level, rollout_rs=option, rollout_rs_threshold=threshold)


PRESETS: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        _preset("none", "–", unchanged),
        _preset("ratio", "–", plain_ratio),
        _preset("slime-tis", "slime", slime_tis),
        _preset("slime-icepop", "slime", slime_icepop),
        _preset("slime-opsm", "slime", slime_opsm, needs_advantages=True),
        _preset("mis", "slime, miles", mis),
        _preset("verl-token-tis", "verl", verl, rollout_is="token"),
        _preset("verl-seq-tis", "verl", verl, rollout_is="sequence"),
        _preset("verl-icepop", "verl", verl, rollout_is="token", rollout_is_threshold="0.5_5.0"),
        _verl_rs("verl-seq-tis-rs", "seq_sum_k1", "0.5_2.0", "sequence"),
        _verl_rs("verl-geo-rs", "seq_mean_k1", "0.999_1.001"),
        _verl_rs("verl-k3-rs", "seq_mean_k3", 0.01),
        _nemo_rl("nemo-rl-tis", "tis", 0.0, 2.0),
        _nemo_rl("nemo-rl-icepop", "icepop", 0.5, 5.0),
        _nemo_rl("nemo-rl-seq-mask-tis", "seq-mask-tis", 0.999, 1.002),
        _preset("prime-rl-dppo", "prime-rl", prime_rl_dppo, on_by_default=True, needs_advantages=True),
        _preset("prime-rl-ipo", "prime-rl", prime_rl_ipo),
        _preset("roll-weight", "ROLL", roll, weight_type="token"),
        _preset("roll-filter", "ROLL", roll, agg_type="token"),
        _preset("trl", "TRL", trl, on_by_default=True),
        _preset("skyrl-token-tis", "SkyRL", skyrl, tis_ratio_type="token"),
        _preset("skyrl-seq-tis", "SkyRL", skyrl, tis_ratio_type="sequence"),
        _preset("skyrl-geo-mask", "SkyRL", skyrl, sequence_mask_metric="geometric"),
        _preset("openrlhf-tis", "OpenRLHF", openrlhf),
        _preset("openrlhf-icepop", "OpenRLHF", openrlhf, vllm_is_correction_type="icepop"),
        _preset("openrlhf-seq-mask-tis", "OpenRLHF", openrlhf, vllm_is_correction_type="seq-mask-tis"),
        _preset("areal", "AReaL", areal),
    )
}
"""Every preset by its name. A rule's own defaults are its framework's, where that has any; a preset changes what turns
the correction on, to what the framework's documentation or configuration recommends."""


def parse_policy(text: str) -> Policy:
    """``NAME`` or ``NAME:PARAMETER=VALUE,…`` as a policy.

    Raises:
        UnknownPolicy: no such preset or parameter.
    """
    name, _, rest = text.partition(":")
    if name not in PRESETS:
        raise _bad("--policy", name, "one of " + ", ".join(PRESETS))
    policy = PRESETS[name]
    changed: dict[str, Value] = {}
    parameter = ""
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals and parameter:  # a further entry of a list, such as rollout_rs=token_k1,seq_sum_k1
            changed[parameter] = f"{changed[parameter]},{part}"
            continue
        parameter = key.strip()
        changed[parameter] = parse_value(policy, parameter, value)
    return policy.changed(**changed)


@dataclass(frozen=True)
class Sweep:
    """One policy at several values of one parameter: ``policies`` has one entry for each, in the order given."""

    parameter: str
    policies: tuple[Policy, ...]


def parse_sweep(text: str) -> Sweep:
    """``NAME:PARAMETER=VALUE,VALUE,…``; other parameters of the policy may stand before the last one.

    Raises:
        UnknownPolicy: no such preset or parameter, or no values.
    """
    head, equals, listed = text.rpartition("=")
    name, _, parameter = head.rpartition(",") if "," in head else head.partition(":")
    values = [one.strip() for one in listed.split(",") if one.strip()]
    if not equals or not values:
        raise _bad("--sweep", text, "NAME:PARAMETER=VALUE,VALUE,…")
    policy = parse_policy(name)
    return Sweep(
        parameter, tuple(policy.changed(**{parameter: parse_value(policy, parameter, value)}) for value in values)
    )


def label(policy: Policy) -> str:
    """The policy's name with the parameters that are not its preset's: what ``--policy`` takes."""
    default = PRESETS[policy.name].parameters
    changed = ",".join(
        f"{key}={shown_value(value)}" for key, value in policy.parameters.items() if value != default[key]
    )
    return f"{policy.name}:{changed}" if changed else policy.name


def shown_value(value: Value) -> str:
    """A parameter's value as a user writes it."""
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if value is None else str(value)


def parse_value(policy: Policy, parameter: str, text: str) -> Value:
    """A parameter's value from text: none, true, false, a number, else the text itself.

    Raises:
        UnknownPolicy: the policy has no such parameter.
    """
    if parameter not in policy.parameters:
        known = ", ".join(policy.parameters) or "no parameter"
        raise _bad(f"parameter of {policy.name}", parameter, known)
    words: dict[str, Value] = {"none": None, "null": None, "true": True, "false": False}
    if text.strip().lower() in words:
        return words[text.strip().lower()]
    try:
        return float(text) if "_" not in text else text.strip()  # Python would read 0.5_2.0 as a number
    except ValueError:
        return text.strip()
