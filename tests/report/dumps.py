"""A run's dumps for the report: what a healthy run leaves, and ways to break it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Change = Callable[[list[dict[str, Any]], list[dict[str, Any]]], None]
"""Changes train samples and rollout samples in place."""

HOSTILE = "</script><script>window.pwned=1</script><img src=x onerror=window.pwned=2>"


def write_run(
    folder: Path,
    *,
    rollouts: int = 1,
    samples: int = 8,
    length: int = 40,
    prompt: int = 10,
    noise: float = 0.002,
    cp: int = 2,
    change: Change | None = None,
    changed_from: int = 0,
    tensors: bool = False,
) -> Path:
    """Write ``rollout_data/`` and ``train_data/`` below ``folder``; ``change`` is applied from a rollout on.

    ``tensors``: the rollout dump holds tensors instead of lists, which read many times faster.
    """
    for name in ("rollout_data", "train_data"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for rollout_id in range(rollouts):
        generator = torch.Generator().manual_seed(rollout_id)
        pairs = [one_pair(i, length, prompt, noise, generator) for i in range(samples)]
        train, source = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if change is not None and rollout_id >= changed_from:
            change(train, source)
        if tensors:
            for one in source:
                for name in ("tokens", "loss_mask", "rollout_log_probs"):
                    one[name] = torch.tensor(one[name])
        torch.save({"rollout_id": rollout_id, "samples": source}, folder / "rollout_data" / f"{rollout_id}.pt")
        torch.save(payload(rollout_id, train, source, cp), folder / "train_data" / f"{rollout_id}.pt")
    return folder


def one_pair(
    position: int, length: int, prompt: int, noise: float, generator: torch.Generator
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A train sample and its rollout sample. A quarter of the log-probs are low, as in real text."""
    tokens = torch.randint(5, 1000, (prompt + length,), generator=generator)
    rollout = -torch.rand(length, generator=generator).pow(3) * 4
    train = rollout + noise * torch.randn(length, generator=generator)
    mask = torch.ones(length, dtype=torch.int32)
    if length >= 20:
        mask[length // 3 : length // 2] = 0  # a tool's output: two turns
    reward = float(position % 2)
    trained = {
        "data_parallel_rank": 0,
        "rollout_position": position,
        "sample_index": 100 + position,
        "tokens": tokens,
        "total_lengths": prompt + length,
        "response_lengths": length,
        "rewards": reward - 0.5,
        "loss_masks": mask,
        "rollout_ids": 100 + position,
        "log_probs": train.clamp(max=0),
        "rollout_log_probs": rollout,
        "advantages": torch.full((length,), reward - 0.5),
    }
    source = {
        "index": 100 + position,
        "group_index": position // 4,
        "prompt": f"Question {position}?",
        "response": f"Answer {position}.",
        "tokens": tokens.tolist(),
        "response_length": length,
        "reward": reward,
        "loss_mask": mask.tolist(),
        "rollout_log_probs": rollout.tolist(),
        "remove_sample": False,
        "status": "completed" if position % 3 else "truncated",
        "metadata": {"source": "arithmetic"},
    }
    return trained, source


def payload(rollout_id: int, train: list[dict[str, Any]], source: list[dict[str, Any]], cp: int) -> dict[str, Any]:
    """The v2 file of these train samples."""
    provenance = {
        "slime_instrument": "0.1.0", "slime": "0.3.1", "torch": "2.13.0", "megatron_core": "0.16.1",
        "tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": cp, "data_parallel": 1,
        "route": "test", "fields": {"log_probs": "captured", "rollout_log_probs": "rollout"},
    }  # fmt: skip
    shard = {
        "rank": 0,
        "data_parallel_rank": 0,
        "sample_indices": [one["sample_index"] for one in train],
        "partition": [one["rollout_position"] for one in train],
        "provenance": provenance,
    }
    return {
        "format_version": 2,
        "rollout_id": rollout_id,
        "rank": 0,
        "samples": train,
        "dp_shards": [shard],
        "raw_reward": [float(one["reward"]) if isinstance(one["reward"], float) else 0.0 for one in source],
    }


def shifted(train: list[dict[str, Any]], _source: list[dict[str, Any]]) -> None:
    """Every log-prob stands one token too far to the right."""
    for one in train:
        one["log_probs"] = one["log_probs"].roll(1)


def one_bad_token(train: list[dict[str, Any]], _source: list[dict[str, Any]]) -> None:
    """Sample 5, token 7 is off by 3 nats."""
    train[5]["log_probs"][7] = train[5]["rollout_log_probs"][7] - 3.0


def ragged(train: list[dict[str, Any]], source: list[dict[str, Any]]) -> None:
    """NaN, -inf, None, an empty response, an unmatched sample, a masked one, hostile text."""
    train[0]["log_probs"][3] = float("nan")
    train[1]["log_probs"][4] = -float("inf")
    source[2]["rollout_log_probs"][5] = None
    for one, name in ((train[3], "response_lengths"), (source[3], "response_length")):
        one[name] = 0
    for name in ("loss_masks", "log_probs", "rollout_log_probs", "advantages"):
        train[3][name] = train[3][name][:0]
    source[3]["loss_mask"], source[3]["rollout_log_probs"] = [], []
    train[3]["tokens"], source[3]["tokens"] = train[3]["tokens"][:10], source[3]["tokens"][:10]
    train[3]["total_lengths"] = 10
    train[4]["tokens"] = train[4]["tokens"] + 1
    train[6]["loss_masks"] = torch.zeros_like(train[6]["loss_masks"])
    source[6]["loss_mask"] = [0] * source[6]["response_length"]
    source[5]["prompt"] = source[5]["response"] = source[5]["status"] = HOSTILE
    source[5]["metadata"] = {HOSTILE: HOSTILE}
    source[5]["reward"] = {HOSTILE: 1.0}
    source[7]["reward"] = None
    source[7]["remove_sample"] = True
