"""Ranks as plain data: topologies, and what a rank of a given layout holds of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime_instrument._dump.restore import Part, Shard, restore
from slime_instrument._dump.shard import Contribution, contribute
from slime_instrument._dump.topology import Topology
from slime_instrument._dump.zigzag import owned


def topology(cp: int = 1, cp_rank: int = 0, dp: int = 1, dp_rank: int = 0) -> Topology:
    """A last-stage rank at TP rank 0; global ranks count context-parallel ranks first."""
    return Topology(
        rank=dp_rank * cp + cp_rank,
        tensor_parallel=1,
        tensor_rank=0,
        pipeline_parallel=1,
        context_parallel=cp,
        context_rank=cp_rank,
        data_parallel=dp,
        data_rank=dp_rank,
        last_stage=True,
        participants=tuple(range(cp * dp)),
    )


def cut(full: torch.Tensor, total: int, cp: int, rank: int, padded: int | None = None) -> torch.Tensor:
    """The part of a full response that ``rank`` holds: its front chunk, then its back chunk."""
    front, back = owned(total, full.size(0), cp, rank, padded)
    return torch.cat([full[front.start : front.stop], full[back.start : back.stop]])


def sharded(data: dict[str, Any], cp: int, rank: int, fields: Sequence[str]) -> dict[str, Any]:
    """``data`` as a context-parallel rank has it."""
    return {
        key: [cut(value, total, cp, rank) for value, total in zip(values, data["total_lengths"], strict=True)]
        if key in fields
        else values
        for key, values in data.items()
    }


def part(contribution: Contribution) -> Part:
    return Part(contribution.manifest, contribution.packer.flats())


def gathered(shards: Sequence[Sequence[dict[str, Any]]], fields: Sequence[str], **more: Any) -> list[Shard]:
    """``shards[dp_rank][cp_rank]`` put together as the writer does."""
    cp = len(shards[0])
    parts = [
        part(contribute(data, topology(cp, cp_rank, len(shards), dp_rank), fields, **more))
        for dp_rank, of_rank in enumerate(shards)
        for cp_rank, data in enumerate(of_rank)
    ]
    return restore(parts, cp, fields)
