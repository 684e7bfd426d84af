"""Put the parts of all ranks together again. Pure: what arrived in, whole rollout_data per data-parallel rank out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slime_instrument.dump.packing import Flats, Ref
from slime_instrument.dump.shard import Manifest
from slime_instrument.dump.zigzag import scatter_index
from slime_instrument.errors import DumpError

__all__ = ["Part", "Shard", "restore"]


@dataclass(frozen=True)
class Part:
    """One rank's contribution as it arrived at the writer."""

    manifest: Manifest
    flats: Flats


@dataclass(frozen=True)
class Shard:
    """One data-parallel rank's samples with every field whole. ``rank`` is the global rank of its CP rank 0."""

    rank: int
    data_rank: int
    rollout_data: dict[str, Any]
    provenance: dict[str, Any]


def restore(parts: Sequence[Part], cp: int, cp_fields: Sequence[str]) -> list[Shard]:
    """Group ``parts`` by data-parallel rank, in its order, and restore each. ``cp``: context-parallel size."""
    by_data_rank: dict[int, dict[int, Part]] = {}
    for part in parts:
        by_data_rank.setdefault(part.manifest.data_rank, {})[part.manifest.context_rank] = part
    return [_restore_one(by_data_rank[data_rank], cp, cp_fields) for data_rank in sorted(by_data_rank)]


def _restore_one(parts: Mapping[int, Part], cp: int, cp_fields: Sequence[str]) -> Shard:
    missing = [rank for rank in range(cp) if rank not in parts]
    if missing:
        raise DumpError(f"context-parallel rank(s) {missing} contributed nothing")
    head = parts[0]
    assert head.manifest.common is not None
    rollout_data = {key: _with_tensors(value, head.flats) for key, value in head.manifest.common.items()}
    totals, responses = rollout_data["total_lengths"], rollout_data["response_lengths"]
    padded = rollout_data.get("max_seq_lens") if head.manifest.provenance.get("qkv_format") == "bshd" else None
    indices = [scatter_index(totals, responses, cp, rank, padded) for rank in range(cp)] if cp > 1 else []
    gaps = sum(len(index) for index in indices) < sum(responses)
    for name in cp_fields:
        holders = {rank: part for rank, part in parts.items() if name in part.manifest.sharded}
        if holders:
            rollout_data[name] = list(_whole_field(name, holders, responses, indices, gaps).split(list(responses)))
    return Shard(head.manifest.rank, head.manifest.data_rank, rollout_data, head.manifest.provenance)


def _whole_field(
    name: str, holders: Mapping[int, Part], responses: Sequence[int], indices: list[torch.Tensor], gaps: bool
) -> torch.Tensor:
    """All responses of one field, concatenated: shape ``(sum of responses, *tail)``."""
    fields = {rank: part.manifest.sharded[name] for rank, part in holders.items()}
    first = next(iter(fields.values()))
    if any((f.dtype, f.tail) != (first.dtype, first.tail) for f in fields.values()):
        raise DumpError(f"{name} has another dtype or shape on another context-parallel rank")

    def flat(rank: int) -> torch.Tensor:
        key = (name, first.dtype)
        return holders[rank].flats.buffers[key].view(-1, *first.tail)

    if not indices:
        return flat(0)
    full = next((rank for rank, held in fields.items() if held.full), None)
    if full is not None:
        return flat(full)
    if len(holders) < len(indices):
        raise DumpError(f"{name} is missing on context-parallel rank(s) {sorted(set(range(len(indices))) - set(holders))}")
    whole = torch.empty(sum(responses), *first.tail, dtype=first.dtype)
    if gaps and first.dtype.is_floating_point:
        whole.fill_(float("nan"))  # a token that no rank owns has no value; 0.0 would be a log-prob
    elif gaps:
        whole.zero_()
    for rank, index in enumerate(indices):
        whole.index_copy_(0, index, flat(rank))
        del holders[rank].flats.buffers[(name, first.dtype)]  # memory stays at one copy of the file
    return whole


def _with_tensors(value: Any, flats: Flats) -> Any:
    if isinstance(value, Ref):
        return flats.tensor(value)
    if isinstance(value, dict):
        return {key: _with_tensors(item, flats) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if value and not isinstance(value[0], (Ref, dict, list, tuple)) and not any(
            isinstance(item, (Ref, dict, list, tuple)) for item in value
        ):
            return value
        return type(value)(_with_tensors(item, flats) for item in value)
    return value
