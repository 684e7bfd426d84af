"""The process groups that slime trains in: Megatron's own over gloo, else a stand-in with the same functions.

The stand-in is for machines without megatron-core. It knows what a dump asks for and nothing else: context-parallel
ranks are neighbours, data-parallel ranks come next, as in Megatron's default order.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Any

import torch.distributed as dist

__all__ = ["initialise", "load"]

_NAME = "megatron.core.parallel_state"


def load(*, stand_in: bool = False) -> str:
    """Import Megatron's parallel state, or put the stand-in in its place; returns which. Call it before forking."""
    if not stand_in and importlib.util.find_spec("megatron") is not None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                importlib.import_module(_NAME)
            return "megatron-core"
        except ImportError:
            pass
    state: Any = _StandIn(_NAME)
    core: Any = ModuleType("megatron.core")
    megatron: Any = ModuleType("megatron")
    megatron.__path__, core.__path__ = [], []
    megatron.core, core.parallel_state, core.mpu = core, state, state
    sys.modules.update({"megatron": megatron, "megatron.core": core, _NAME: state, "megatron.core.mpu": state})
    return "stand-in"


def initialise(cp: int, *, gloo_groups: bool = True) -> None:
    """Make the groups on this rank; the data-parallel size is what is left of the world."""
    state: Any = sys.modules[_NAME]
    state.initialize_model_parallel(context_parallel_size=cp, create_gloo_process_groups=gloo_groups)


class _StandIn(ModuleType):
    def initialize_model_parallel(self, context_parallel_size: int, create_gloo_process_groups: bool) -> None:
        rank, world, cp = dist.get_rank(), dist.get_world_size(), context_parallel_size
        self._cp, self._dp = cp, world // cp
        self._gloo = create_gloo_process_groups
        for first in range(0, world, cp):
            ranks = list(range(first, first + cp))
            group = dist.new_group(ranks, backend="gloo")
            if rank in ranks:
                self._cp_group = group
        for offset in range(cp):
            ranks = list(range(offset, world, cp))
            group = dist.new_group(ranks, backend="gloo")
            if rank in ranks:
                self._dp_group, self._dp_source = group, ranks[0]
        self._all = dist.new_group(list(range(world)), backend="gloo")

    def model_parallel_is_initialized(self) -> bool:
        return True

    def is_pipeline_last_stage(self, ignore_virtual: bool = True) -> bool:
        return True

    def get_tensor_model_parallel_rank(self) -> int:
        return 0

    def get_tensor_model_parallel_world_size(self) -> int:
        return 1

    get_pipeline_model_parallel_world_size = get_tensor_model_parallel_world_size

    def get_context_parallel_world_size(self) -> int:
        return self._cp

    def get_context_parallel_rank(self) -> int:
        return dist.get_rank() % self._cp

    def get_context_parallel_group(self) -> Any:
        return self._cp_group

    def get_data_parallel_world_size(self, with_context_parallel: bool = False) -> int:
        return self._dp * (self._cp if with_context_parallel else 1)

    def get_data_parallel_rank(self, with_context_parallel: bool = False) -> int:
        return dist.get_rank() if with_context_parallel else dist.get_rank() // self._cp

    def get_data_parallel_src_rank(self, with_context_parallel: bool = False) -> int:
        return 0 if with_context_parallel else self._dp_source

    def get_data_parallel_group(self, with_context_parallel: bool = False) -> Any:
        return self._all if with_context_parallel else self._dp_group

    def get_data_parallel_group_gloo(self, with_context_parallel: bool = False) -> Any:
        assert self._gloo, "data parallel group-gloo is not initialized"
        return self.get_data_parallel_group(with_context_parallel)
