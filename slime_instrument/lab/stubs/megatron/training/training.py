"""Model chunks of this pipeline stage, in Megatron-Core's distributed wrapper."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core import mpu, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config

from .global_vars import get_args


def get_model(provider: Callable[..., Any], model_type: Any = None, wrap_with_ddp: bool = True, **_: Any) -> list[Any]:
    args = get_args()
    args.model_type = model_type
    chunks = _build_chunks(provider, args.virtual_pipeline_model_parallel_size)
    for chunk in chunks:
        chunk.model_type = model_type
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    config = get_model_config(chunks[0])
    if args.fp16 or args.bf16:
        chunks = [Float16Module(config, chunk) for chunk in chunks]
    if not wrap_with_ddp:
        return chunks
    names = {entry.name for entry in dataclasses.fields(DistributedDataParallelConfig)}
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    values |= {
        "grad_reduce_in_fp32": True,
        "check_for_nan_in_grad": args.check_for_nan_in_loss_and_grad,
        "bucket_size": None,
    }
    ddp_config = DistributedDataParallelConfig(**values)
    return [
        DistributedDataParallel(config=config, ddp_config=ddp_config, module=chunk, disable_bucketing=number > 0)
        for number, chunk in enumerate(chunks)
    ]


def _build_chunks(provider: Callable[..., Any], virtual: int | None) -> list[Any]:
    if virtual is None or mpu.get_pipeline_model_parallel_world_size() == 1:
        return [provider(pre_process=mpu.is_pipeline_first_stage(), post_process=mpu.is_pipeline_last_stage())]
    chunks = []
    for stage in range(virtual):
        chunk = provider(
            pre_process=mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            vp_stage=stage,
        )
        chunk.vp_stage = stage
        chunks.append(chunk)
    return chunks
