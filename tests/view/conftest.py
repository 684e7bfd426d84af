"""The viewer's tests need textual, and dumps."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

collect_ignore_glob = [] if importlib.util.find_spec("textual") else ["test_*.py"]

Edit = Callable[[list[dict[str, Any]], list[dict[str, Any]]], None]


@pytest.fixture
def write_dumps(tmp_path: Path) -> Callable[..., Path]:
    """A ``--dump-details`` folder of one rollout: 6 samples of 12 tokens, sample i off by i/1000 everywhere."""

    def write(edit: Edit | None = None, *, rollout_id: int = 3) -> Path:
        train, source = [], []
        for i in range(6):
            tokens, rollout = torch.arange(20 * i, 20 * i + 16), -torch.arange(1.0, 13.0) / 10
            train.append(
                {
                    "data_parallel_rank": 0,
                    "rollout_position": i,
                    "sample_index": 50 + i,
                    "tokens": tokens,
                    "total_lengths": 16,
                    "response_lengths": 12,
                    "loss_masks": torch.ones(12, dtype=torch.int32),
                    "rollout_log_probs": rollout,
                    "log_probs": rollout + i / 1000,
                    "advantages": torch.full((12,), float(i - 3)),
                }
            )
            source.append(
                {
                    "index": 50 + i,
                    "tokens": tokens.tolist(),
                    "response_length": 12,
                    "reward": float(i % 2),
                    "rollout_log_probs": rollout.tolist(),
                    "status": "truncated" if i == 4 else "completed",
                }
            )
        if edit is not None:
            edit(train, source)
        shard = {"rank": 0, "data_parallel_rank": 0, "sample_indices": None, "partition": list(range(6))}
        head = {"format_version": 2, "rollout_id": rollout_id, "rank": 0}
        for name in ("train_data", "rollout_data"):
            (tmp_path / name).mkdir(exist_ok=True)
        torch.save(
            {**head, "samples": train, "dp_shards": [shard], "raw_reward": [0.5] * 6},
            tmp_path / "train_data" / f"{rollout_id}.pt",
        )
        torch.save({"rollout_id": rollout_id, "samples": source}, tmp_path / "rollout_data" / f"{rollout_id}.pt")
        return tmp_path

    return write
