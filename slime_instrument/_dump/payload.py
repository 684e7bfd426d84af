"""The v2 payload: the ranks' parts put together, one list of samples in rollout order, and what is not per sample under
``dp_shards``.

Also the provenance: where a dump came from, the one thing in the file that is ours alone.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from slime_instrument._dump.agree import Seen, Topology
from slime_instrument._dump.contribute import (
    COMMON,
    ORDINARY_DTYPES,
    Contribution,
    Description,
    InFile,
    Ref,
    Sharded,
    Stored,
    StreamKey,
    bytes_of,
    deeper,
)
from slime_instrument._dump.zigzag import Run, runs
from slime_instrument._errors import DumpError, contained, log
from slime_instrument._format.schema import COLUMN_TO_SAMPLE_KEY, FORMAT_VERSION, ID_COLUMNS, PROVENANCE
from slime_instrument._installation import versions

# What decides how slime makes advantages and losses of rewards: recorded, so that they can be recomputed.
_ARGUMENTS = (
    "advantage_estimator", "normalize_advantages", "grpo_std_normalization", "rewards_normalization",
    "n_samples_per_prompt", "rollout_batch_size", "global_batch_size", "num_steps_per_rollout", "gamma", "lambd",
    "kl_coef", "use_kl_loss", "kl_loss_coef", "kl_loss_type", "entropy_coef", "eps_clip", "eps_clip_high", "eps_clip_c",
    "use_tis", "tis_clip", "tis_clip_low", "use_opsm", "calculate_per_token_loss", "loss_type", "use_rollout_logprobs",
    "rollout_temperature", "rollout_top_p", "rollout_top_k", "rollout_min_p", "use_dynamic_batch_size", "qkv_format",
    "allgather_cp", "custom_tis_function_path", "disable_grpo_std_normalization", "disable_rewards_normalization",
    "compute_advantages_and_returns", "custom_advantage_function_path", "custom_reward_post_process_path", "reward_key",
    "use_opd", "opd_kl_coef", "opsm_delta", "use_unbiased_kl", "get_mismatch_metrics", "custom_loss_function_path",
    "custom_pg_loss_reducer_function_path",
)  # fmt: skip


def provenance(
    data: Mapping[str, Any], args: Any, topology: Topology, seen: Seen, cp_fields: Sequence[str]
) -> dict[str, Any]:
    """Versions, sizes, the arming route, slime's arguments, and per response-level field where its values come from.

    ``fields``: "rollout" came with the samples, "captured" is the training forward's own value, "recomputed" was
    computed before the training steps. ``positions``: "partition" is slime's own word, "reconstructed" was worked out
    and proven (v0.2.0), "unknown" means that samples are ordered by their index. ``captured_optimizer_steps``: per
    local sample, the step within the rollout at which it was captured. ``log_probs`` says in words why that field is
    absent, where it is. ``weight_version``: the trainer's own count of weight updates, where it has one.
    ``steps``: per optimizer step of the rollout its losses and the norm of its gradient, as slime computed them.
    """
    sources = {
        name: "rollout" if name in seen.came_with_rollout else "recomputed"
        for name in cp_fields
        if data.get(name) is not None
    }
    if "log_probs" in sources and (seen.log_probs is not None or seen.captured_by_slime):
        sources["log_probs"] = "captured"
    described: dict[str, Any] = {
        **versions(),
        **topology.sizes(),
        "route": seen.route,
        "qkv_format": str(getattr(args, "qkv_format", "thd")),
        "fields": sources,
        "positions": seen.positions_from if "partition" in data else "unknown",
        "arguments": _arguments(args),
    }
    if seen.weight_version is not None:
        described["weight_version"] = seen.weight_version
    if seen.step_results:
        described["steps"] = [
            {"step": step, "grad_norm": _number(norm), "losses": _numbers(losses)}
            for step, losses, norm in seen.step_results
        ]
    if seen.log_probs is not None and seen.optimizer_steps is not None:
        described["captured_optimizer_steps"] = list(seen.optimizer_steps)
    if "log_probs" not in sources:
        described["log_probs"] = seen.why_no_log_probs
    return described


def _numbers(losses: Any) -> dict[str, float]:
    found = {str(name): _number(value) for name, value in losses.items()} if isinstance(losses, Mapping) else {}
    return {name: value for name, value in found.items() if value is not None}


def _number(value: Any) -> float | None:
    """A number, or a tensor of one; None for anything else."""
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None


def _arguments(args: Any) -> dict[str, Any]:
    """Those of slime's arguments that are plain values and decide what training computed."""
    given = {name: getattr(args, name, None) for name in _ARGUMENTS}
    return {name: value for name, value in given.items() if type(value) in (bool, int, float, str)}


# ---------------------------------------------------------------------------------------------------------------------
# Putting the parts of one data-parallel rank together


@dataclass
class Restored:
    """One data-parallel rank's part: the parts of its context-parallel ranks put together.

    ``flats``: the tensors that those have alike, one for each stream. ``fields``: restored field -> for each sample a
    tensor of shape ``(response, *tail)``, or what stands for a tensor in a file. ``left_out``: field -> why its parts
    do not make a whole; that field is missing, the others are not.
    """

    head: Description
    flats: dict[StreamKey, torch.Tensor]
    fields: dict[str, list[Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def put_together(contributions: Sequence[Contribution], cp: int, cp_fields: Sequence[str]) -> list[Restored]:
    """By data-parallel rank. ``cp``: context-parallel size. Takes their streams, field by field, so that nearly nothing
    is there twice."""
    by_rank: dict[int, dict[int, Contribution]] = {}
    for one in contributions:
        by_rank.setdefault(one.description.data_rank, {})[one.description.context_rank] = one
    return [_restored(by_rank[rank], cp, cp_fields) for rank in sorted(by_rank)]


def _restored(parts: Mapping[int, Contribution], cp: int, cp_fields: Sequence[str]) -> Restored:
    """``parts``: by context-parallel rank."""
    missing = [rank for rank in range(cp) if rank not in parts]
    if missing:
        raise DumpError(f"context-parallel rank(s) {missing} contributed nothing")
    head = parts[0].description
    totals, responses, padded = head.total_lengths, head.response_lengths, head.padded
    for rank, part in parts.items():
        if (part.description.total_lengths, part.description.response_lengths) != (totals, responses):
            raise DumpError(f"context-parallel rank {rank} has other samples than rank 0")

    @cache  # nearly always all fields hold the same samples
    def runs_of(rank: int, samples: tuple[int, ...]) -> list[Run]:
        return runs(
            [totals[i] for i in samples],
            [responses[i] for i in samples],
            cp,
            rank,
            None if padded is None else [padded[i] for i in samples],
        )

    restored = Restored(head, {key: parts[0].take(key) for key in list(parts[0].streams) if key[0] == COMMON})
    for name in cp_fields:
        held = {rank: one.description.sharded[name] for rank, one in parts.items() if name in one.description.sharded}
        if held:
            try:
                restored.fields[name] = _restored_field(name, head, held, parts, cp, runs_of)
            except DumpError as error:
                restored.left_out[name] = str(error)
    return restored


def _restored_field(
    name: str,
    head: Description,
    held: Mapping[int, Sequence[Sharded]],
    parts: Mapping[int, Contribution],
    cp: int,
    runs_of: Callable[[int, tuple[int, ...]], list[Run]],
) -> list[Any]:
    """The values of one field, by sample. ``held``, ``parts``: by context-parallel rank. Raises :class:`DumpError`."""
    kinds = {rank: [(one.key, one.samples) for one in groups] for rank, groups in held.items()}
    first = next(iter(held))
    if any(kind != kinds[first] for kind in kinds.values()):
        raise DumpError("has another dtype or shape on another context-parallel rank")
    whole_on = next((rank for rank, groups in held.items() if any(one.full for one in groups)), None)
    if cp == 1:
        whole_on = 0
    if whole_on is None and len(held) < cp:
        raise DumpError(f"is missing on context-parallel rank(s) {sorted(set(range(cp)) - set(held))}")
    if whole_on is not None and any(one.full is False for groups in held.values() for one in groups):
        raise DumpError(f"is whole on context-parallel rank {whole_on} and a shard on another")
    placed: dict[int, Any] = dict(head.in_files.get(name, {}))
    for number, (key, samples) in enumerate(kinds[first]):
        responses = [head.response_lengths[i] for i in samples]
        cuts = {rank: runs_of(rank, samples) for rank in (held if whole_on is None else ())}
        for rank, groups in held.items():
            there = sum(groups[number].lengths)
            expected = sum(responses) if whole_on is not None else sum(run.length for run in cuts[rank])
            if there != expected:
                raise DumpError(
                    f"of context-parallel rank {rank} holds {there} values; rank 0's lengths make it {expected}"
                )
        if whole_on is None:
            whole = _joined(key, sum(responses), parts, cuts)
        else:
            whole = parts[whole_on].take(key)
            for rank in held:
                parts[rank].streams.pop(key, None)
        views = torch.split(whole.view(sum(responses), *key[2]), responses)
        placed.update(zip(samples, views, strict=True))
    if len(placed) < len(head.response_lengths):
        raise DumpError("is in files for some samples, and missing on context-parallel rank 0")
    return [placed[i] for i in range(len(head.response_lengths))]


def _joined(
    key: StreamKey, count: int, parts: Mapping[int, Contribution], cuts: Mapping[int, Sequence[Run]]
) -> torch.Tensor:
    """The whole responses, flat; one part after the other is taken and given up.

    A part is contiguous in them but for its two chunks, which makes this a handful of memory copies per sample and no
    arithmetic per token.
    """
    _, dtype, tail = key
    row = dtype.itemsize * int(torch.Size(tail).numel())
    whole = torch.empty(count * row // dtype.itemsize, dtype=dtype, device="cpu")
    memory = bytes_of(whole)
    if sum(run.length for cut in cuts.values() for run in cut) < count:
        # A token that no rank owns has no value; 0.0 would be a log-prob.
        if dtype in ORDINARY_DTYPES:
            whole.fill_(float("nan") if dtype.is_floating_point or dtype.is_complex else 0)
        else:
            memory[:] = bytes(len(memory))
    for rank, cut in cuts.items():
        shard = bytes_of(parts[rank].take(key))
        for source, target, length in cut:
            memory[target * row : (target + length) * row] = shard[source * row : (source + length) * row]
    if dtype in ORDINARY_DTYPES and dtype.is_floating_point:
        # slime's native dump sums zero-padded shards, and -0.0 + 0.0 is 0.0: PPO's kl comes out with other bits.
        whole.add_(0.0)
    return whole


# ---------------------------------------------------------------------------------------------------------------------
# The payload


def build_payload(parts: Sequence[Restored], *, rollout_id: int, writer_rank: int) -> dict[str, Any]:
    """Samples sorted by ``rollout_position``, else by ``sample_index``, else in gather order with a warning.

    ``parts``: one for each data-parallel rank, in its order.
    """
    samples: list[dict[str, Any]] = []
    layout: list[dict[str, Any]] = []
    whole_batch: dict[str, Any] = {}
    for part in parts:
        part_samples, part_layout, part_whole = _split(part)
        samples += part_samples
        layout.append(part_layout)
        whole_batch = {**part_whole, **whole_batch}
    order = next((key for key in ("rollout_position", "sample_index") if _orders(samples, key)), None)
    if order is not None:
        samples.sort(key=lambda sample: int(sample[order]))
    elif samples:
        log(
            logging.WARNING,
            "slime_instrument: the samples of rollout %s carry neither positions nor indices; they stay in the order "
            "in which the ranks were gathered",
            rollout_id,
        )
    head = {"format_version": FORMAT_VERSION, "rollout_id": rollout_id, "rank": writer_rank}
    return {**head, "samples": samples, "dp_shards": layout, **whole_batch}


def left_out(payload: Mapping[str, Any]) -> dict[str, str]:
    """Fields that this dump lacks because a value of theirs could not be stored -> why."""
    return {name: why for shard in payload["dp_shards"] for name, why in shard[PROVENANCE].get("left_out", {}).items()}


def _split(part: Restored) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    head = part.head
    missing = {**head.left_out, **{name: why for name, why in part.left_out.items() if name not in head.left_out}}

    def with_tensors(fields: Mapping[Any, Any]) -> dict[Any, Any]:
        resolved = {}
        for name, value in fields.items():
            with contained(partial(missing.__setitem__, str(name))):
                try:
                    resolved[name] = _WithTensors(part.flats).value(value)
                except RecursionError:
                    with deeper():
                        resolved[name] = _WithTensors(part.flats).value(value)
        return resolved

    ids = with_tensors(head.ids)
    columns = with_tensors({**head.columns, **part.fields})
    count = len(head.response_lengths)
    samples: list[dict[str, Any]] = [{"data_parallel_rank": head.data_rank} for _ in range(count)]
    layout: dict[str, Any] = {"rank": head.rank, "data_parallel_rank": head.data_rank}
    for column in ID_COLUMNS:
        values = ids.get(column)
        layout[column] = None if values is None else list(values)
        if values is not None and len(values) != count:
            # Which of them belongs to which sample cannot be known, and a wrong position is worse than none.
            missing[COLUMN_TO_SAMPLE_KEY[column]] = f"{column} has {len(values)} values for {count} samples"
            continue
        for sample, value in zip(samples, values if values is not None else (), strict=False):
            sample[COLUMN_TO_SAMPLE_KEY[column]] = value
    layout.update(with_tensors(head.layout))
    for name, column in columns.items():
        with contained(partial(missing.__setitem__, str(name))):  # not every layout of a tensor can be cut into samples
            values = [column[index] for index in range(count)]  # by index: a sparse tensor has no iterator
            for sample, value in zip(samples, values, strict=True):
                sample[name] = value
    whole = with_tensors(head.whole)
    if PROVENANCE in layout:
        missing[PROVENANCE] = "slime_instrument's own record stands under this name"
    layout[PROVENANCE] = {
        **head.provenance,
        **({"positions": "unknown"} if "rollout_position" in missing else {}),
        **({"converted": head.converted} if head.converted else {}),
        **({"left_out": missing} if missing else {}),
    }
    return samples, layout, whole


class _WithTensors:
    """Puts tensors in the places of what stands for them. What was shared stays shared: nests may have more paths than
    anybody can walk."""

    def __init__(self, flats: Mapping[StreamKey, torch.Tensor]) -> None:
        self._flats = flats
        self._done: dict[int, Any] = {}

    def value(self, value: Any) -> Any:
        kind = type(value)
        if kind is Ref:
            return self._tensor(value)
        if kind not in _NESTED:
            return value
        if id(value) in self._done:
            return self._done[id(value)]
        found: Any = value
        if kind is Stored:
            found = torch.load(io.BytesIO(self._tensor(value.file).numpy().tobytes()), weights_only=True)
        elif kind is InFile:
            found = value.reference.load()
        elif kind is dict:
            found = {}
            for key, item in value.items():  # loops: a comprehension would double the depth of deep nestings
                found[key] = self.value(item)
        elif not _NESTED.isdisjoint(map(type, value)):
            items = []
            for item in value:
                items.append(self.value(item))
            found = kind(items)
        self._done[id(value)] = found
        return found

    def _tensor(self, ref: Ref) -> torch.Tensor:
        count = int(torch.Size(ref.shape).numel())
        if not count:
            return torch.empty(ref.shape, dtype=ref.key[1], device="cpu")
        return self._flats[ref.key][ref.start : ref.start + count].view(ref.shape)


_NESTED = frozenset({Ref, Stored, InFile, dict, list, tuple, set})


def _orders(samples: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Whether every sample has a number under ``key``."""
    try:
        return (
            bool(samples)
            and all(sample.get(key) is not None for sample in samples)
            and bool([int(sample[key]) for sample in samples])
        )
    except (TypeError, ValueError):
        return False
