"""The v2 payload: one list of samples in rollout order, and what is not per sample under ``dp_shards``. Pure."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from slime_instrument._dump.restore import Shard
from slime_instrument._format.schema import (
    COLUMN_TO_SAMPLE_KEY,
    FORMAT_VERSION,
    ID_COLUMNS,
    LAYOUT_FIELDS,
    PROVENANCE,
    WHOLE_BATCH_FIELDS,
)

__all__ = ["build_payload"]

logger = logging.getLogger("slime_instrument")


def build_payload(shards: Sequence[Shard], *, rollout_id: int, writer_rank: int) -> dict[str, Any]:
    """Samples sorted by ``rollout_position``, else by ``sample_index``, else in gather order with a warning."""
    samples: list[dict[str, Any]] = []
    layout: list[dict[str, Any]] = []
    whole_batch: dict[str, Any] = {}
    for shard in shards:
        shard_samples, shard_layout, shard_whole = _split(shard)
        samples += shard_samples
        layout.append(shard_layout)
        whole_batch = {**shard_whole, **whole_batch}
    order = next((key for key in ("rollout_position", "sample_index") if _orders(samples, key)), None)
    if order is not None:
        samples.sort(key=lambda sample: int(sample[order]))
    elif samples:
        logger.warning(
            "slime_instrument: the samples of rollout %s carry neither positions nor indices; they stay in the order "
            "in which the ranks were gathered",
            rollout_id,
        )
    head = {"format_version": FORMAT_VERSION, "rollout_id": rollout_id, "rank": writer_rank}
    return {**head, "samples": samples, "dp_shards": layout, **whole_batch}


def _split(shard: Shard) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    data = shard.rollout_data
    count = len(data["response_lengths"])
    samples: list[dict[str, Any]] = [{"data_parallel_rank": shard.data_rank} for _ in range(count)]
    layout: dict[str, Any] = {"rank": shard.rank, "data_parallel_rank": shard.data_rank}
    whole: dict[str, Any] = {}
    for column in ID_COLUMNS:
        values = data.get(column)
        layout[column] = None if values is None else list(values)
        for sample, value in zip(samples, values or (), strict=False):
            sample[COLUMN_TO_SAMPLE_KEY[column]] = value
    for key, value in data.items():
        if key in ID_COLUMNS:
            continue
        if key in WHOLE_BATCH_FIELDS:
            whole[key] = value
        elif key in LAYOUT_FIELDS or not _is_per_sample(value, count):
            layout[key] = value
        else:
            for sample, item in zip(samples, value, strict=True):
                sample[key] = item
    layout[PROVENANCE] = shard.provenance
    return samples, layout, whole


def _is_per_sample(value: Any, count: int) -> bool:
    if torch.is_tensor(value):
        return value.dim() >= 1 and value.size(0) == count
    return isinstance(value, (list, tuple)) and len(value) == count


def _orders(samples: Sequence[dict[str, Any]], key: str) -> bool:
    return bool(samples) and all(sample.get(key) is not None for sample in samples)
