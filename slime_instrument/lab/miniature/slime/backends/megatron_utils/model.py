"""The training loop over Megatron-Core's pipeline schedules."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config
from megatron.training.global_vars import get_args

from slime.utils import logging_utils

from .data import DataIterator, get_batch
from .loss import loss_function


def _run_model(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    output: torch.Tensor = model(
        input_ids=batch["tokens"],
        position_ids=None,
        attention_mask=None,
        labels=None,
        packed_seq_params=batch["packed_seq_params"],
    )
    return output


@torch.no_grad()
def forward_only(
    f: Callable[..., Any],
    args: Namespace,
    model: Sequence[Any],
    data_iterator: Sequence[DataIterator],
    num_microbatches: Sequence[int],
    store_prefix: str = "",
) -> dict[str, list[torch.Tensor]]:
    """Run ``f`` on the logits of every micro-batch; per-sample results in rollout order, on the last stage."""
    for iterator in data_iterator:
        iterator.reset()
    keys = ["tokens", "loss_masks", "total_lengths", "response_lengths"]

    def forward_step(iterator: DataIterator, chunk: Any, return_schedule_plan: bool = False) -> Any:
        batch = get_batch(iterator, keys, args.data_pad_size_multiplier, args.allgather_cp)
        finish = partial(
            f,
            args=args,
            unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
            with_entropy=args.use_rollout_entropy,
        )
        return _run_model(chunk, batch), finish

    for chunk in model:
        chunk.eval()
    get_model_config(model[0]).timers = None
    stored: list[dict[str, list[torch.Tensor]]] = []
    for count in num_microbatches:
        stored += get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=list(data_iterator),
            model=list(model),
            num_microbatches=count,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=True,
        )
    for chunk in model:
        chunk.train()
    if not mpu.is_pipeline_last_stage():
        return {}
    order = [index for indices in data_iterator[0].micro_batch_indices for index in indices]
    results = {}
    for key in stored[0]:
        values = [value for one in stored for value in one[key]]
        placed = dict(zip(order, values, strict=True))
        results[f"{store_prefix}{key}"] = [placed[index] for index in range(len(values))]
    return results


def train_one_step(
    args: Namespace,
    rollout_id: int,
    step_id: int,
    data_iterator: Sequence[DataIterator],
    model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    num_microbatches: int,
    step_global_batch_size: int,
) -> tuple[dict[str, float], float]:
    """Forward and backward over the step's micro-batches, then one optimizer step."""
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()

    def forward_step(iterator: DataIterator, chunk: Any, return_schedule_plan: bool = False) -> Any:
        batch = get_batch(
            iterator,
            # A fixed list: what else is in the rollout data does not come along.
            [
                "tokens",
                "total_lengths",
                "response_lengths",
                "loss_masks",
                "log_probs",
                "ref_log_probs",
                "advantages",
                "returns",
                "rollout_log_probs",
                "rollout_mask_sums",
            ],
            args.data_pad_size_multiplier,
            args.allgather_cp,
        )
        return _run_model(chunk, batch), partial(loss_function, args, batch, num_microbatches, step_global_batch_size)

    reported = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=list(data_iterator),
        model=list(model),
        num_microbatches=num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        decoder_seq_length=args.decoder_seq_length,
        forward_only=False,
    )
    successful, grad_norm, _ = optimizer.step()
    assert successful
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    if not mpu.is_pipeline_last_stage(ignore_virtual=True):
        return {}, grad_norm
    values = torch.stack([one["values"] for one in reported]).sum(0)
    dist.all_reduce(values, group=mpu.get_data_parallel_group(with_context_parallel=True))
    metrics = (values / step_global_batch_size).tolist()
    return dict(zip(reported[0]["keys"], metrics, strict=True)), grad_norm


def train(
    rollout_id: int,
    model: Sequence[Any],
    optimizer: Any,
    opt_param_scheduler: Any,
    data_iterator: Sequence[DataIterator],
    num_microbatches: Sequence[int],
    global_batch_sizes: Sequence[int],
) -> None:
    """All optimizer steps of one rollout."""
    args = get_args()
    for iterator in data_iterator:
        iterator.reset()
    for chunk in model:
        chunk.train()
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    config.timers = None
    for step_id, (count, rollouts) in enumerate(zip(num_microbatches, global_batch_sizes, strict=True)):
        losses, grad_norm = train_one_step(
            args,
            rollout_id,
            step_id,
            data_iterator,
            model,
            optimizer,
            opt_param_scheduler,
            count,
            rollouts,
        )
        first = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
        if first and mpu.get_tensor_model_parallel_rank() == 0 and mpu.is_pipeline_last_stage(ignore_virtual=True):
            metrics: dict[str, Any] = {f"train/{key}": value for key, value in losses.items()}
            metrics["train/grad_norm"] = grad_norm
            metrics["train/step"] = rollout_id * len(num_microbatches) + step_id
            logging_utils.log(args, metrics, step_key="train/step")
