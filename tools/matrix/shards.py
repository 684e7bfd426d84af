"""Our one file against slime's own old files, one per rank: every value that slime wrote, bit for bit.

Which response tokens a rank owns is counted here token by token, apart from the algebra that restores them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slime_instrument._format.schema import CONTEXT_PARALLEL_FIELDS, WHOLE_BATCH_FIELDS
from tools.matrix.compare import differences
from tools.matrix.layouts import Layout


def from_shards(ours: Mapping[str, Any], files: Sequence[Path], layout: Layout) -> Iterator[str]:
    """Where the v2 file ``ours`` lacks or changes something that is in slime's per-rank ``files``."""
    shards = {shard["data_parallel_rank"]: shard for shard in ours["dp_shards"]}
    for path in files:
        numbers = re.fullmatch(r"\d+_(\d+)\.pt", path.name)
        if numbers is None:
            yield f"{path.name}: not one of slime's per-rank files"
            continue
        rank = int(numbers[1])
        # Megatron's order of ranks: tensor-parallel ones are neighbours, then context, then data, then pipeline.
        cp_rank = rank // layout.tp % layout.cp
        dp_rank = rank // (layout.tp * layout.cp) % layout.dp
        local = _local_samples(ours, shards[dp_rank])
        data = torch.load(path, weights_only=True, map_location="cpu")["rollout_data"]
        for name, value in data.items():
            if value is not None:
                yield from _field(name, value, local, shards[dp_rank], ours, layout.cp, cp_rank, f"rank {rank} {name}")


def _local_samples(ours: Mapping[str, Any], shard: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The shard's samples in the order in which its rank held them."""
    if shard["partition"] is not None:
        by_position = {sample["rollout_position"]: sample for sample in ours["samples"]}
        return [by_position[position] for position in shard["partition"]]
    mine = [s for s in ours["samples"] if s["data_parallel_rank"] == shard["data_parallel_rank"]]
    by_index = {sample["sample_index"]: sample for sample in mine}
    return [by_index[index] for index in shard["sample_indices"]]


def _field(
    name: str,
    value: Any,
    local: Sequence[Mapping[str, Any]],
    shard: Mapping[str, Any],
    ours: Mapping[str, Any],
    cp: int,
    cp_rank: int,
    where: str,
) -> Iterator[str]:
    if name == "sample_indices":
        yield from differences(shard[name], list(value), where)
    elif name in shard:
        yield from differences(shard[name], value, where)
    elif name in WHOLE_BATCH_FIELDS:
        yield from differences(ours[name], value, where)
    elif len(value) != len(local):
        yield f"{where}: {len(value)} entries for {len(local)} samples, and not in the shard's own part"
    else:
        for number, (sample, item) in enumerate(zip(local, value, strict=True)):
            if name not in sample:
                yield f"{where}[{number}]: missing"
            elif name not in CONTEXT_PARALLEL_FIELDS or cp == 1 or item.shape == sample[name].shape:
                yield from differences(sample[name], item, f"{where}[{number}]")
            else:
                places = _owned(sample["total_lengths"], sample["response_lengths"], cp, cp_rank)
                # As in slime's native dump, which adds up padded shards, a restored -0.0 is 0.0.
                yield from differences(sample[name][places], item + 0.0, f"{where}[{number}]")


def _owned(total: int, response: int, cp: int, cp_rank: int) -> list[int]:
    chunk = 0
    while chunk * 2 * cp < total:
        chunk += 1
    places = []
    for number in (cp_rank, 2 * cp - 1 - cp_rank):
        for position in range(number * chunk, (number + 1) * chunk):
            place = position + 1 - (total - response)
            if place >= 0 and position + 1 < total:
                places.append(place)
    return places
