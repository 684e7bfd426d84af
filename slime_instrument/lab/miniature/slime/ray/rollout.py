"""From generated samples to one box of training data per data-parallel rank."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from typing import Any

import ray
import torch

from slime.utils.dp_schedule import build_dp_schedule
from slime.utils.misc import Box
from slime.utils.types import Sample

# What each rank gets its own part of; the lengths and raw rewards of the whole batch go to everyone.
_SPLIT = (
    "tokens",
    "response_lengths",
    "rewards",
    "truncated",
    "loss_masks",
    "sample_indices",
    "rollout_ids",
    "rollout_mask_sums",
    "rollout_log_probs",
    "source_names",
)
_WHOLE = ("raw_reward", "total_lengths")
_TENSORS = {"tokens": torch.long, "loss_masks": torch.int, "rollout_log_probs": torch.float32}


class RolloutManager:
    def __init__(self, args: Namespace, train_parallel_config: dict[str, Any]) -> None:
        self.args = args
        self.train_parallel_config = train_parallel_config

    def _post_process_rewards(self, samples: list[Sample]) -> tuple[list[Any], list[float]]:
        raw = [sample.get_reward_value(self.args) for sample in samples]
        if self.args.advantage_estimator != "grpo" or not self.args.rewards_normalization:
            return raw, raw
        group = self.args.n_samples_per_prompt
        if len(raw) != group * self.args.rollout_batch_size:
            group = len(raw)
        rewards = torch.tensor(raw, dtype=torch.float).reshape(-1, group)
        rewards = rewards - rewards.mean(dim=-1, keepdim=True)
        if self.args.grpo_std_normalization:
            rewards = rewards / (rewards.std(dim=-1, keepdim=True) + 1e-6)
        return raw, rewards.flatten().tolist()

    def _convert_samples_to_train_data(self, samples: list[Sample]) -> dict[str, Any]:
        raw, rewards = self._post_process_rewards(samples)
        loss_masks = []
        for sample in samples:
            mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
            loss_masks.append([0] * sample.response_length if sample.remove_sample else mask)
        rollout_ids = _filled([sample.rollout_id for sample in samples])
        mask_sums: Counter[int] = Counter()
        for rollout, mask in zip(rollout_ids, loss_masks, strict=True):
            mask_sums[rollout] += sum(mask)
        data = {
            "tokens": [sample.tokens for sample in samples],
            "response_lengths": [sample.response_length for sample in samples],
            "rewards": rewards,
            "raw_reward": raw,
            "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
            "sample_indices": [sample.index for sample in samples],
            "rollout_ids": rollout_ids,
            "loss_masks": loss_masks,
            "rollout_mask_sums": [mask_sums[rollout] for rollout in rollout_ids],
            "source_names": [sample.metadata.get("source_name", "unknown") for sample in samples],
        }
        if samples[0].rollout_log_probs is not None:
            data["rollout_log_probs"] = [sample.rollout_log_probs for sample in samples]
        return data

    def _split_train_data_by_dp(self, data: dict[str, Any]) -> list[Box]:
        data["total_lengths"] = [len(tokens) for tokens in data["tokens"]]
        partitions, micro_batch_indices, num_microbatches, global_batch_sizes = build_dp_schedule(
            self.args,
            self.train_parallel_config,
            data["total_lengths"],
            global_batch_size=self.args.global_batch_size,
            rollout_indices=data["rollout_ids"],
        )
        boxes = []
        for partition, indices in zip(partitions, micro_batch_indices, strict=True):
            share: dict[str, Any] = {"partition": partition}
            share |= {key: [data[key][position] for position in partition] for key in _SPLIT if key in data}
            share |= {key: data[key] for key in _WHOLE}
            share["global_batch_sizes"] = global_batch_sizes
            share["num_microbatches"] = num_microbatches
            share["micro_batch_indices"] = indices
            for key, dtype in _TENSORS.items():
                if key in share:
                    share[key] = [torch.tensor(value, dtype=dtype) for value in share[key]]
            share["rollout_mask_sums"] = torch.tensor(share["rollout_mask_sums"], dtype=torch.float32)
            boxes.append(Box(ray.put(share)))
        return boxes


def _filled(rollout_ids: list[int | None]) -> list[int]:
    """Samples without a rollout get one of their own."""
    taken = {rollout for rollout in rollout_ids if rollout is not None}
    free = (number for number in range(len(taken) + len(rollout_ids)) if number not in taken)
    return [next(free) if rollout is None else rollout for rollout in rollout_ids]
