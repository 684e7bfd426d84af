"""Identity and order of the samples of a v2 file, and their agreement with the shards they came from."""

from __future__ import annotations

from collections import Counter
from typing import Any

from slime_instrument._format.checks.context import V2Dump
from slime_instrument._format.checks.values import as_list, gaps, show, whole_number
from slime_instrument._format.findings import Findings
from slime_instrument._format.schema import COLUMN_TO_SAMPLE_KEY

__all__ = ["check_order", "check_shards"]


def check_order(dump: V2Dump, found: Findings) -> None:
    """Samples stand in rollout order, each position once.

    Without positions they stand by ``sample_index``, which says something only if each is there once: siblings of one
    execution share it, and it may be None.
    """
    if not dump.samples:
        return
    positions = dump.positions
    known = [position for position in positions if position is not None]
    places: dict[int, list[int]] = {}
    for (i, _), position in zip(dump.samples, positions, strict=True):
        if position is not None:
            places.setdefault(position, []).append(i)
    for position, at in sorted(places.items()):
        if len(at) > 1:
            message = f"rollout_position {position} is there {len(at)} times, in samples {show(at)}"
            found.error("duplicate", message, sample=at[1], field="rollout_position")
    if len(known) == len(positions):
        _check_ascending(dump, "rollout_position", known, found)
        return
    if known:
        at = [i for (i, _), own in zip(dump.samples, positions, strict=True) if own is None]
        message = f"{len(known)} of {len(positions)} samples have a rollout_position; samples without: {show(at)}"
        found.error("uneven-field", message, sample=at[0], field="rollout_position")
        return
    indices = [whole_number(sample.get("sample_index")) for _, sample in dump.samples]
    if any(index is None for index in indices):
        message = (
            "samples have neither rollout_position nor sample_index: their order is that of the shards, and joining "
        )
        found.warning("ambiguous", message + "them with a rollout dump is ambiguous", field="sample_index")
        return
    _check_ascending(dump, "sample_index", [index for index in indices if index is not None], found)
    repeated = [index for index, count in Counter(indices).items() if count > 1]
    if repeated:
        message = (
            f"no rollout_position, and sample_index {show(repeated)} belongs to several samples: joining is ambiguous"
        )
        found.warning("ambiguous", message, field="sample_index")


def check_shards(dump: V2Dump, found: Findings) -> None:
    """Each shard lists the samples that carry its data-parallel rank, and every rank is there once."""
    ranks = [whole_number(shard.get("data_parallel_rank")) for _, shard in dump.shards]
    for k, (i, shard) in enumerate(dump.shards):
        if ranks[k] is None:
            found.error("structure", f"dp_shards[{i}] has no data_parallel_rank", field="dp_shards")
        elif ranks[k] in ranks[:k]:
            found.error("duplicate", f"dp_shards[{i}] repeats data_parallel_rank {ranks[k]}", field="dp_shards")
        else:
            _check_shard_columns(dump, i, shard, ranks[k], found)
    present = {rank for rank in ranks if rank is not None}
    absent = gaps(present, max(present, default=-1) + 1)
    if absent:
        message = f"dp_shards lacks data_parallel_rank {show(absent)} of {max(present) + 1}"
        found.error("missing-shard", message, field="dp_shards")
    for i, sample in dump.samples:
        rank = whole_number(sample.get("data_parallel_rank"))
        if rank is not None and rank not in present:
            message = f"sample {i}: data_parallel_rank is {rank}, and no entry of dp_shards has it"
            found.error("missing-shard", message, sample=i, field="data_parallel_rank")


def _check_shard_columns(dump: V2Dump, i: int, shard: dict[str, Any], rank: int | None, found: Findings) -> None:
    members = [sample for _, sample in dump.samples if whole_number(sample.get("data_parallel_rank")) == rank]
    for column, key in COLUMN_TO_SAMPLE_KEY.items():
        values = as_list(shard.get(column))
        if values is None:
            if shard.get(column) is not None:
                found.error("type", f"dp_shards[{i}].{column} is no list", field=column)
            continue
        if len(values) != len(members):
            message = f"dp_shards[{i}].{column} has {len(values)} entries, but {len(members)} samples have its rank"
            found.error("length", message, field=column)
            continue
        own = [sample.get(key) for sample in members]
        if Counter(map(_plain, values)) != Counter(map(_plain, own)):
            message = f"dp_shards[{i}].{column} is {show(values)}, but its samples have {key} {show(own)}"
            found.error("shard-mismatch", message, field=column)


def _check_ascending(dump: V2Dump, key: str, values: list[int], found: Findings) -> None:
    for k in range(1, len(values)):
        if values[k] < values[k - 1]:
            i = dump.samples[k][0]
            message = f"sample {i}: {key} is {values[k]} after {values[k - 1]}; samples stand in rising order"
            found.error("order", message, sample=i, field=key)


def _plain(value: Any) -> Any:
    number = whole_number(value)
    return number if number is not None else repr(value)
