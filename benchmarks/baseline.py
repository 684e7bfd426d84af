"""slime's own way to the same file, to compare with: its own code where a checkout of #2266 is at hand, else a
rendering of what that code does.

The rendering does the same work in the same order: every response-level field of every sample is put into zeros of
the whole response and summed over the context-parallel group by one all-reduce of its own; the data-parallel shards
are pickled whole and gathered as objects; the samples are saved tensor by tensor.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn

import slime_instrument
from benchmarks.timing import Stopwatch
from slime_instrument._dump.agree import PARALLEL_STATE, Topology
from slime_instrument._dump.contribute import contribute
from slime_instrument._dump.payload import build_payload, put_together
from slime_instrument._dump.zigzag import owned
from slime_instrument._format.schema import NATIVE_CONTEXT_PARALLEL_FIELDS
from slime_instrument.lab._sources import find_sources

__all__ = ["Baseline", "load"]

_COMMIT = "681b3adca"
_MODULE = "slime.backends.megatron_utils.train_dump_utils"


@dataclass(frozen=True)
class Baseline:
    """``name`` says which code it is. ``dump`` writes one file and returns the seconds of each phase on this rank."""

    name: str
    dump: Callable[[dict[str, Any], str], Stopwatch]


def load(*, own_rendering: bool = False) -> Baseline:
    """slime's own code if a checkout that holds it is found, else the rendering. Call it before forking."""
    module = None if own_rendering else _slime()
    if module is None:
        return Baseline("rendering of slime's way (no checkout of 681b3adca found)", _rendering)
    return Baseline(f"slime {_COMMIT}, its own code", lambda data, path: _native(module, data, path))


def _slime() -> ModuleType | None:
    checkout = next((folder for folder in find_sources() if folder.name == _COMMIT), None)
    if checkout is None:
        return None
    # What is measured against must not be instrumented itself.
    slime_instrument.uninstrument()
    sys.path.insert(0, str(checkout))
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns of kernels that a dump does not use
    try:
        importlib.import_module("slime.backends.megatron_utils.cp_utils")
        return importlib.import_module(_MODULE)
    except ImportError:
        return None
    finally:
        logging.disable(previous)
        sys.path.remove(str(checkout))


def _native(module: Any, data: dict[str, Any], path: str) -> Stopwatch:
    watch = Stopwatch()
    with (
        watch.around(module, "restore_context_parallel_fields_to_cpu", "restore"),
        watch.around(dist, "gather_object", "gather"),
        watch.whole(),
    ):
        module.save_debug_train_data(SimpleNamespace(save_debug_train_data=path), rollout_id=0, rollout_data=data)
    return watch


def _rendering(data: dict[str, Any], path: str) -> Stopwatch:
    watch, state = Stopwatch(), sys.modules[PARALLEL_STATE]
    mpu: Any = state
    with watch.whole():
        with watch.phase("restore"), torch.no_grad():
            restored = _restore(mpu, data)
        if mpu.get_context_parallel_rank() != 0:
            return watch
        shard = dist.get_rank(), mpu.get_data_parallel_rank(with_context_parallel=False), restored
        source, size = mpu.get_data_parallel_src_rank(), mpu.get_data_parallel_world_size()
        writes = dist.get_rank() == source
        shards: Any = [None] * size if writes else None
        if size > 1:
            with watch.phase("gather"):
                dist.gather_object(shard, shards, dst=source, group=mpu.get_data_parallel_group_gloo())
        else:
            shards = [shard]
        if writes:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            parts = [part for rank, data_rank, data in shards for part in _whole(rank, data_rank, data)]
            torch.save(build_payload(parts, rollout_id=0, writer_rank=dist.get_rank()), path)
    return watch


def _whole(rank: int, data_rank: int, data: dict[str, Any]) -> list[Any]:
    """Restored data of one data-parallel rank in the form from which the payload is built."""
    place = Topology(rank, 1, 0, 1, 1, 0, 1, data_rank, last_stage=True, participants=(rank,))
    return put_together([contribute(data, place, NATIVE_CONTEXT_PARALLEL_FIELDS)], 1, NATIVE_CONTEXT_PARALLEL_FIELDS)


def _restore(mpu: Any, data: dict[str, Any]) -> dict[str, Any]:
    """On context-parallel rank 0 the whole rollout_data on the CPU; every other rank only takes part."""
    cp, rank, group = (
        mpu.get_context_parallel_world_size(),
        mpu.get_context_parallel_rank(),
        mpu.get_context_parallel_group(),
    )
    keep = rank == 0
    restored = {key: value for key, value in data.items() if key not in NATIVE_CONTEXT_PARALLEL_FIELDS} if keep else {}
    for name in NATIVE_CONTEXT_PARALLEL_FIELDS:
        if data.get(name) is None:
            continue
        whole = []
        for value, total, response in zip(data[name], data["total_lengths"], data["response_lengths"], strict=True):
            full = value
            if cp > 1:
                front, back = owned(total, response, cp, rank)
                full = torch.zeros(response, *value.shape[1:], dtype=value.dtype, device=value.device)
                full[front.start : front.stop] = value[: len(front)]
                full[back.start : back.stop] = value[len(front) :]
                full = dist_nn.all_reduce(full, group=group)  # type: ignore[no-untyped-call]
            if keep:
                whole.append(full.detach().cpu())
        if keep:
            restored[name] = whole
    return restored
