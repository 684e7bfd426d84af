"""Small dumps for tests, right in every field unless a test breaks them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def sample(
    position: int, *, total: int = 6, response: int = 3, rank: int = 0, index: int | None = None
) -> dict[str, Any]:
    """One sample of a v2 file."""
    index = position if index is None else index
    start = 100 * position
    return {
        "data_parallel_rank": rank,
        "sample_index": index,
        "rollout_position": position,
        "tokens": torch.arange(start, start + total),
        "response_lengths": response,
        "rewards": 0.5,
        "loss_masks": torch.ones(response, dtype=torch.int32),
        "rollout_ids": index,
        "rollout_mask_sums": torch.tensor(float(response)),
        "total_lengths": total,
        "rollout_log_probs": -torch.arange(1, response + 1, dtype=torch.float32),
        # Off downwards, upwards, upwards, downwards: all in one direction would be a fault.
        "log_probs": -torch.arange(1, response + 1, dtype=torch.float32) - 0.1 * (-1) ** (position + position // 2),
        "advantages": torch.full((response,), 0.5),
    }


def v2(
    partitions: Sequence[Sequence[int]] = ((0, 2), (1, 3)),
    *,
    batch: int | None = None,
    responses: Sequence[int] | None = None,
    indices: Sequence[int] | None = None,
    provenance: bool = False,
) -> dict[str, Any]:
    """A v2 payload, one partition of positions per data-parallel rank, one sample per micro-batch, one step."""
    n = sum(map(len, partitions))
    batch = n if batch is None else batch
    samples, shards = [], []
    for rank, partition in enumerate(partitions):
        own = [
            sample(
                position,
                rank=rank,
                response=3 if responses is None else responses[position],
                index=None if indices is None else indices[position],
            )
            for position in partition
        ]
        samples += own
        shard: dict[str, Any] = {
            "rank": rank,
            "data_parallel_rank": rank,
            "sample_indices": [one["sample_index"] for one in own],
            "partition": list(partition),
            "micro_batch_indices": [[i] for i in range(len(own))],
            "num_microbatches": [len(own)],
            "global_batch_sizes": [n],
        }
        if provenance:
            shard["provenance"] = {
                "slime_instrument": "0.1.0",
                "data_parallel": len(partitions),
                "fields": {"log_probs": "captured", "rollout_log_probs": "rollout"},
            }
        shards.append(shard)
    if len({len(partition) for partition in partitions}) > 1:
        # All ranks run as many micro-batches per step; with uneven shards some hold several samples.
        for shard in shards:
            shard["micro_batch_indices"] = [list(range(len(shard["partition"])))]
            shard["num_microbatches"] = [1]
    samples.sort(key=lambda one: one["rollout_position"])
    return {
        "format_version": 2,
        "rollout_id": 7,
        "rank": 0,
        "samples": samples,
        "dp_shards": shards,
        "raw_reward": [float(position) for position in range(batch)],
    }


def rollout(payload: dict[str, Any] | None = None, *, batch: int | None = None) -> dict[str, Any]:
    """The rollout dump that a v2 payload came from; samples that are not in it are made up."""
    payload = v2() if payload is None else payload
    by_position = {one["rollout_position"]: one for one in payload["samples"]}
    batch = len(payload["raw_reward"]) if batch is None else batch
    samples = []
    for position in range(batch):
        one = by_position.get(position, sample(position))
        samples.append(
            {
                "index": one["sample_index"],
                "group_index": 0,
                "tokens": one["tokens"].tolist(),
                "response_length": one["response_lengths"],
                "reward": float(position),
                "loss_mask": one["loss_masks"].tolist(),
                "rollout_log_probs": one["rollout_log_probs"].tolist(),
                "remove_sample": False,
                "status": "completed",
                "metadata": {},
            }
        )
    return {"rollout_id": payload["rollout_id"], "samples": samples}


def rank_file(rank: int, partition: Sequence[int], *, batch: int = 4, first_index: int = 0) -> dict[str, Any]:
    """An old per-rank payload, context-parallel size 1."""
    own = [sample(position, index=first_index + position) for position in partition]
    columns = ("tokens", "response_lengths", "total_lengths", "loss_masks", "rollout_log_probs", "log_probs")
    data: dict[str, Any] = {name: [one[name] for one in own] for name in columns}
    data["sample_indices"] = [one["sample_index"] for one in own]
    data["raw_reward"] = [float(position) for position in range(batch)]
    return {"rollout_id": 7, "rank": rank, "rollout_data": data}


def save(payload: Any, path: Path) -> Path:
    """Write a payload as torch does, with tensors that share no storage."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(copy.deepcopy(payload), path)
    return path
