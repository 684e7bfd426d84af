"""The same weights on every layout, and weights on disk to compare runs bit for bit."""

from __future__ import annotations

import zlib
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu


def named(actor_module: Any, args: Namespace, actor: Any) -> Iterable[tuple[str, torch.Tensor]]:
    """Parameters and buffers of this rank by their names in the whole model."""
    found: Iterable[tuple[str, torch.Tensor]] = actor_module.named_params_and_buffers(
        args, actor.model, convert_to_global_name=True
    )
    return found


@torch.no_grad()
def set_by_name(actor_module: Any, args: Namespace, actor: Any, tag: str) -> None:
    """Seed each whole tensor by its global name and ``tag``, then keep this tensor-parallel rank's part of it."""
    for name, parameter in named(actor_module, args, actor):
        if parameter.dim() < 2:
            continue
        tp_size, tp_rank = _tensor_parallel(name)
        sharded = getattr(parameter, "tensor_model_parallel", False)
        dim, stride = getattr(parameter, "partition_dim", 0), getattr(parameter, "partition_stride", 1)
        if "linear_fc1" in name and args.swiglu:
            # Gate and up lie one behind the other, each cut by itself; core 0.14 leaves 1 here.
            stride = 2
        shape = list(parameter.shape)
        if sharded:
            shape[dim] *= tp_size
        seed = zlib.crc32(f"{tag} {name.split('module.')[-1]}".encode())
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(shape, generator=generator) * 0.25
        if sharded and tp_size > 1:
            weight = torch.cat([block.chunk(tp_size, dim)[tp_rank] for block in weight.chunk(stride, dim)], dim)
        parameter.copy_(weight)
    changed(args, actor, tag)


def changed(args: Namespace, actor: Any, tag: str) -> None:
    """Tell whoever keeps a copy of the weights that they were changed from outside."""
    if args.bf16:
        actor.optimizer.reload_model_params()
    actor.weights_backuper.backup(tag)


def _tensor_parallel(name: str) -> tuple[int, int]:
    """Size and rank over which this parameter is cut: experts have groups of their own."""
    if ".experts." in name:
        return mpu.get_expert_tensor_parallel_world_size(), mpu.get_expert_tensor_parallel_rank()
    return mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()


def save(actor_module: Any, args: Namespace, actor: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: tensor.detach().clone() for name, tensor in named(actor_module, args, actor)}, path)
