"""Synthetic rollout_data, as one rank holds it after training: known values, cut for its context-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slime_instrument._dump.zigzag import owned
from slime_instrument._format.schema import NATIVE_CONTEXT_PARALLEL_FIELDS

__all__ = ["Case", "rollout_data"]


@dataclass(frozen=True)
class Case:
    """``samples`` per data-parallel rank, each with about ``response`` response tokens; ``fields`` response-level
    fields of float32."""

    cp: int
    dp: int
    samples: int
    response: int
    fields: int
    prompt: int = 64

    @property
    def world(self) -> int:
        return self.cp * self.dp

    def __str__(self) -> str:
        return f"CP{self.cp}·DP{self.dp}, {self.samples} x {self.response}, {self.fields} fields"


def rollout_data(case: Case, rank: int) -> dict[str, Any]:
    """What ``rank`` holds; ranks of one context-parallel group hold parts of the same values."""
    data_rank, cp_rank = divmod(rank, case.cp)
    values = torch.Generator().manual_seed(1000 + data_rank)
    # Neither the responses nor the totals are multiples of anything, so that shards are uneven and some chunks cut.
    responses = [max(1, case.response - sample % 5) for sample in range(case.samples)]
    totals = [response + case.prompt + sample % 7 for sample, response in enumerate(responses)]
    positions = [sample * case.dp + data_rank for sample in range(case.samples)]
    data: dict[str, Any] = {
        "tokens": [torch.randint(0, 150_000, (total,), generator=values) for total in totals],
        "loss_masks": [torch.ones(response, dtype=torch.int32) for response in responses],
        "total_lengths": totals,
        "response_lengths": responses,
        "partition": positions,
        "sample_indices": [1000 + position for position in positions],
        "truncated": [0] * case.samples,
        "rewards": [float(position % 3) for position in positions],
        "raw_reward": [float(position % 2) for position in range(case.samples * case.dp)],
    }
    for name in _field_names(case.fields):
        whole = torch.split(torch.randn(sum(responses), generator=values), responses)
        data[name] = [
            _cut(value, total, response, case.cp, cp_rank)
            for value, total, response in zip(whole, totals, responses, strict=True)
        ]
    return data


def _field_names(count: int) -> tuple[str, ...]:
    if count > len(NATIVE_CONTEXT_PARALLEL_FIELDS):
        raise ValueError(f"--fields must be at most {len(NATIVE_CONTEXT_PARALLEL_FIELDS)}: slime restores no more")
    return NATIVE_CONTEXT_PARALLEL_FIELDS[:count]


def _cut(value: torch.Tensor, total: int, response: int, cp: int, rank: int) -> torch.Tensor:
    front, back = owned(total, response, cp, rank)
    return torch.cat([value[front.start : front.stop], value[back.start : back.stop]])
