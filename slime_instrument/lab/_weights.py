"""The same weights on every layout: seeded by name, or those of a checkpoint; and weights on disk."""

from __future__ import annotations

import json
import shutil
import zlib
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu

from slime_instrument.lab._checkpoint import INDEX, WEIGHTS, Checkpoint


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
        tp_size, _ = _tensor_parallel(name)
        shape = list(parameter.shape)
        if _is_sharded(parameter):
            shape[_cut(name, parameter, args)[0]] *= tp_size
        seed = zlib.crc32(f"{tag} {_plain(name)}".encode())
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(shape, generator=generator) * 0.25
        parameter.copy_(_own_part(weight, name, parameter, args))
    changed(args, actor, tag)


@torch.no_grad()
def load(checkpoint: Checkpoint, actor_module: Any, args: Namespace, actor: Any, tag: str) -> None:
    """Give the model the weights of a checkpoint, each rank its part."""
    from safetensors import safe_open

    opened: dict[Path, Any] = {}

    def tensor(name: str) -> torch.Tensor:
        path = checkpoint.file_of(name)
        if path not in opened:
            opened[path] = safe_open(path, framework="pt")
        found: torch.Tensor = opened[path].get_tensor(name)
        return found

    for name, parameter in named(actor_module, args, actor):
        whole = checkpoint.fused(_plain(name), [tensor(source) for source in checkpoint.sources(_plain(name))])
        parameter.copy_(_own_part(whole, name, parameter, args))
    changed(args, actor, tag)


@torch.no_grad()
def export(checkpoint: Checkpoint, actor_module: Any, args: Namespace, actor: Any, folder: Path) -> None:
    """Write the model's weights as a checkpoint like the one that it was loaded from. Every rank calls this.

    The ranks of one copy of the model take part, one file for each pipeline stage; tensor-parallel parts are joined.
    """
    from safetensors.torch import save_file

    stage, stages = mpu.get_pipeline_model_parallel_rank(), mpu.get_pipeline_model_parallel_world_size()
    file = WEIGHTS if stages == 1 else f"model-{stage + 1:05}-of-{stages:05}.safetensors"
    found: dict[str, torch.Tensor] = {}
    if mpu.get_data_parallel_rank(with_context_parallel=True) == 0:
        for name, parameter in named(actor_module, args, actor):
            if checkpoint.tied and _plain(name) == "output_layer.weight":
                continue
            whole = _joined(name, parameter, args)
            found |= {source: part.contiguous() for source, part in checkpoint.split(_plain(name), whole).items()}
    writes = bool(found) and mpu.get_tensor_model_parallel_rank() == 0
    folder.mkdir(parents=True, exist_ok=True)
    if writes:
        save_file(found, folder / file, metadata={"format": "pt"})
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, {name: (file, part.nbytes) for name, part in found.items()} if writes else {})
    if dist.get_rank() == 0:
        places = {name: place for part in held for name, place in part.items()}
        _write_beside(checkpoint, folder, places, str(args.params_dtype).removeprefix("torch."), indexed=stages > 1)


def _write_beside(
    checkpoint: Checkpoint, folder: Path, places: dict[str, tuple[str, int]], dtype: str, *, indexed: bool
) -> None:
    """Everything in a checkpoint that is no weight: the source's files, the type of the tensors, the index."""
    for path in checkpoint.folder.iterdir():
        if path.is_file() and path.name != INDEX and path.suffix not in (".safetensors", ".bin", ".gguf"):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((checkpoint.folder / "config.json").read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)  # the older name
    (folder / "config.json").write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n", encoding="utf-8")
    if indexed:
        size = sum(size for _, size in places.values())
        index = {"metadata": {"total_size": size}, "weight_map": {name: file for name, (file, _) in places.items()}}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


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


def _plain(name: str) -> str:
    """Megatron's name of a parameter without those of the wrappers around the model."""
    return name.split("module.")[-1]


def _is_sharded(parameter: torch.Tensor) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def _cut(name: str, parameter: torch.Tensor, args: Namespace) -> tuple[int, int]:
    """Along which dimension a parameter is cut, and into how many blocks it is divided before."""
    dim, stride = getattr(parameter, "partition_dim", 0), getattr(parameter, "partition_stride", 1)
    # Gate and up lie one behind the other, each cut by itself; core 0.14 leaves 1 here.
    return dim, 2 if "linear_fc1" in name and args.swiglu else stride


def _own_part(whole: torch.Tensor, name: str, parameter: torch.Tensor, args: Namespace) -> torch.Tensor:
    tp_size, tp_rank = _tensor_parallel(name)
    if tp_size == 1 or not _is_sharded(parameter):
        return whole
    dim, stride = _cut(name, parameter, args)
    return torch.cat([block.chunk(tp_size, dim)[tp_rank] for block in whole.chunk(stride, dim)], dim)


def _joined(name: str, parameter: torch.Tensor, args: Namespace) -> torch.Tensor:
    """The whole parameter from the parts of all tensor-parallel ranks, which all call this."""
    tp_size, _ = _tensor_parallel(name)
    own = parameter.detach()
    if tp_size == 1 or not _is_sharded(parameter):
        return own
    parts = [torch.empty_like(own) for _ in range(tp_size)]
    dist.all_gather(parts, own.contiguous(), group=mpu.get_tensor_model_parallel_group())
    dim, stride = _cut(name, parameter, args)
    blocks: Sequence[Sequence[torch.Tensor]] = [part.chunk(stride, dim) for part in parts]
    return torch.cat([part[number] for number in range(stride) for part in blocks], dim)


def save(actor_module: Any, args: Namespace, actor: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({name: tensor.detach().clone() for name, tensor in named(actor_module, args, actor)}, path)
