"""Micro-batches for the model, and what is logged about a rollout."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams

from slime.utils import logging_utils
from slime.utils.types import RolloutBatch

from .cp_utils import get_sum_of_sample_mean, slice_with_cp

# Not averaged: tokens and bookkeeping. Whatever else is in the rollout data becomes a metric.
_NO_METRIC = {
    "tokens",
    "loss_masks",
    "sample_indices",
    "rollout_ids",
    "rollout_mask_sums",
    "source_names",
    "global_batch_sizes",
    "num_microbatches",
    "micro_batch_indices",
    "local_raw_reward",
}
# One value per response token, and split over context-parallel ranks.
_PER_TOKEN = {"log_probs", "ref_log_probs", "rollout_log_probs", "returns", "advantages"}


class DataIterator:
    """Walks the micro-batches of one data-parallel rank in their scheduled order."""

    def __init__(self, rollout_data: RolloutBatch, micro_batch_indices: list[list[int]]) -> None:
        self.rollout_data = rollout_data
        self.micro_batch_indices = micro_batch_indices
        self.offset = 0

    def get_next(self, keys: Sequence[str]) -> dict[str, list[Any] | None]:
        """The next micro-batch, with exactly the keys asked for; None for those that the rollout has not."""
        indices = self.micro_batch_indices[self.offset]
        self.offset += 1
        batch: dict[str, list[Any] | None] = {}
        for key in keys:
            column = self.rollout_data.get(key)
            batch[key] = None if column is None else [column[index] for index in indices]
        return batch

    def reset(self) -> DataIterator:
        self.offset = 0
        return self


def get_data_iterator(rollout_data: RolloutBatch) -> list[DataIterator]:
    """One iterator per virtual pipeline stage."""
    stages = mpu.get_virtual_pipeline_model_parallel_world_size() or 1
    return [DataIterator(rollout_data, rollout_data["micro_batch_indices"]) for _ in range(stages)]


def get_batch(
    data_iterator: DataIterator, keys: Sequence[str], pad_multiplier: int = 128, allgather_cp: bool = False
) -> dict[str, Any]:
    """A micro-batch as the model takes it: this rank's chunks of every sequence, one behind the other."""
    if allgather_cp:
        raise NotImplementedError("the miniature has zigzag context parallelism only")
    batch: dict[str, Any] = data_iterator.get_next(keys)
    sequences = batch["unconcat_tokens"] = batch["tokens"]
    parts = [slice_with_cp(tokens, 0) for tokens in sequences]
    lengths = [part.numel() for part in parts]
    packed = torch.cat(parts)
    multiple = mpu.get_tensor_model_parallel_world_size() * pad_multiplier
    padding = -packed.numel() % multiple
    if padding:
        packed = F.pad(packed, (0, padding), value=0)
        lengths.append(padding)
    # Packed attention wants boundaries in whole sequences, not in this rank's share of them.
    boundaries = torch.tensor([0, *lengths]).cumsum(0) * mpu.get_context_parallel_world_size()
    cu_seqlens = boundaries.to(device=torch.cuda.current_device(), dtype=torch.int32)
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    batch["tokens"] = packed.unsqueeze(0)
    batch["packed_seq_params"] = PackedSeqParams(
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        qkv_format="thd",
    )
    return batch


def log_rollout_data(rollout_id: int, args: Namespace, rollout_data: RolloutBatch) -> None:
    """Average every list in the rollout data over the whole batch, known or not, and log it."""
    if mpu.get_tensor_model_parallel_rank() != 0 or not mpu.is_pipeline_last_stage():
        return
    cp_size = mpu.get_context_parallel_world_size()
    sum_of_sample_mean = get_sum_of_sample_mean(
        rollout_data["total_lengths"],
        rollout_data["response_lengths"],
        rollout_data["loss_masks"],
        rollout_data["rollout_mask_sums"],
    )
    rollouts = sum(rollout_data["global_batch_sizes"]) / mpu.get_data_parallel_world_size()
    sums: dict[str, tuple[float, float]] = {}
    for key, values in rollout_data.items():
        if key in _NO_METRIC:
            continue
        if not isinstance(values, (list, tuple)):
            raise ValueError(f"cannot average {key}: {type(values).__name__}")
        if key in _PER_TOKEN:
            # Every context-parallel rank adds its part of the sum and counts all rollouts, hence the factor.
            sums[key] = (sum_of_sample_mean(torch.cat(list(values)).detach()).item() * cp_size, rollouts)
        elif isinstance(values[0], torch.Tensor):
            sums[key] = (torch.cat(list(values)).float().mean().item() * len(values), len(values))
        else:
            sums[key] = (sum(values), len(values))
    reduced = _reduce(sums)
    if reduced is not None:
        metrics = {f"rollout/{key}": value for key, value in reduced.items()}
        metrics["rollout/step"] = rollout_id
        logging_utils.log(args, metrics, step_key="rollout/step")


def _reduce(sums: dict[str, tuple[float, float]]) -> dict[str, float] | None:
    """Sum of sums by sum of counts over data- and context-parallel ranks; None but on the first of them."""
    source = mpu.get_data_parallel_src_rank(with_context_parallel=True)
    size = mpu.get_data_parallel_world_size(with_context_parallel=True)
    here = dist.get_rank() == source
    gathered: list[Any] | None = [None] * size if here else None
    dist.gather_object(sums, gathered, dst=source, group=mpu.get_data_parallel_group_gloo(with_context_parallel=True))
    if gathered is None:
        return None
    return {key: sum(one[key][0] for one in gathered) / sum(one[key][1] for one in gathered) for key in sums}
