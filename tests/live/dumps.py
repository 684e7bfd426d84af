"""Payloads as the writer holds them when the file is in place."""

from __future__ import annotations

from typing import Any

import torch


def payload(n: int = 8, length: int = 30, *, rollout_id: int = 4, off: float = 0.0) -> dict[str, Any]:
    """``n`` samples; train and rollout differ by noise of 0.001 nats, and by ``off``."""
    generator = torch.Generator().manual_seed(n + length)
    samples = []
    for i in range(n):
        rollout = -torch.rand(length, generator=generator) * 3
        samples.append(
            {
                "rollout_position": i,
                "sample_index": 200 + i,
                "data_parallel_rank": 0,
                "tokens": torch.arange(i, i + length + 5),
                "total_lengths": length + 5,
                "response_lengths": length,
                "loss_masks": torch.ones(length, dtype=torch.int32),
                "rollout_log_probs": rollout,
                "log_probs": rollout + off + 0.001 * torch.randn(length, generator=generator),
            }
        )
    shard = {"rank": 0, "data_parallel_rank": 0, "sample_indices": None, "partition": list(range(n))}
    return {"format_version": 2, "rollout_id": rollout_id, "rank": 0, "samples": samples, "dp_shards": [shard]}
