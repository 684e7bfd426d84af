"""Ranks as plain data: topologies, and what a rank of a given layout holds of a rollout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from slime_instrument._dump.agree import Topology
from slime_instrument._dump.contribute import Contribution, contribute
from slime_instrument._dump.payload import Restored, build_payload, put_together
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


def sharded(
    data: dict[str, Any], cp: int, rank: int, fields: Sequence[str], padded: Sequence[int] | None = None
) -> dict[str, Any]:
    """``data`` as a context-parallel rank has it."""
    paddings = padded if padded is not None else [None] * len(data["total_lengths"])
    return {
        key: [
            cut(value, total, cp, rank, pad)
            for value, total, pad in zip(values, data["total_lengths"], paddings, strict=True)
        ]
        if key in fields
        else values
        for key, values in data.items()
    }


def contributions(shards: Sequence[Sequence[dict[str, Any]]], fields: Sequence[str], **more: Any) -> list[Contribution]:
    """What all ranks contribute; ``shards[dp_rank][cp_rank]`` is what each of them holds."""
    cp = len(shards[0])
    return [
        contribute(data, topology(cp, cp_rank, len(shards), dp_rank), fields, **more)
        for dp_rank, of_rank in enumerate(shards)
        for cp_rank, data in enumerate(of_rank)
    ]


def gathered(shards: Sequence[Sequence[dict[str, Any]]], fields: Sequence[str], **more: Any) -> list[Restored]:
    """``shards[dp_rank][cp_rank]`` put together as the writer does."""
    return put_together(contributions(shards, fields, **more), len(shards[0]), fields)


def payload_of(shards: Sequence[Sequence[dict[str, Any]]], fields: Sequence[str], **more: Any) -> dict[str, Any]:
    return build_payload(gathered(shards, fields, **more), rollout_id=0, writer_rank=0)
