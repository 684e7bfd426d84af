"""Who this rank is: sizes and ranks, read from Megatron once per dump. Plain data; no communication."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

__all__ = ["Topology", "megatron_is_up", "read_topology"]

PARALLEL_STATE = "megatron.core.parallel_state"


@dataclass(frozen=True)
class Topology:
    """This rank's place. ``participants`` are the global ranks that hold a part of the dump, in Megatron's order: one
    per data- and context-parallel rank, on the last pipeline stage, at tensor-parallel rank 0. The first writes."""

    rank: int
    tensor_parallel: int
    tensor_rank: int
    pipeline_parallel: int
    context_parallel: int
    context_rank: int
    data_parallel: int
    data_rank: int
    last_stage: bool
    participants: tuple[int, ...]

    @property
    def takes_part(self) -> bool:
        """TP ranks hold the same token values, and earlier stages none of the computed ones."""
        return self.last_stage and self.tensor_rank == 0

    @property
    def writer(self) -> int:
        return self.participants[0]

    @property
    def is_writer(self) -> bool:
        return self.takes_part and self.rank == self.writer

    def sizes(self) -> dict[str, int]:
        names = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")
        return {name: getattr(self, name) for name in names}


def megatron_is_up() -> bool:
    """Whether this process trains with Megatron groups. Imports nothing."""
    state: Any = sys.modules.get(PARALLEL_STATE)
    return state is not None and bool(state.model_parallel_is_initialized())


def read_topology() -> Topology:
    import torch.distributed as dist

    state: Any = sys.modules[PARALLEL_STATE]
    group = state.get_data_parallel_group(with_context_parallel=True)
    return Topology(
        rank=dist.get_rank(),
        tensor_parallel=state.get_tensor_model_parallel_world_size(),
        tensor_rank=state.get_tensor_model_parallel_rank(),
        pipeline_parallel=state.get_pipeline_model_parallel_world_size(),
        context_parallel=state.get_context_parallel_world_size(),
        context_rank=state.get_context_parallel_rank(),
        data_parallel=state.get_data_parallel_world_size(with_context_parallel=False),
        data_rank=state.get_data_parallel_rank(with_context_parallel=False),
        # Virtual stages are ignored: the last physical stage holds the last virtual one.
        last_stage=state.is_pipeline_last_stage(ignore_virtual=True),
        participants=tuple(dist.get_process_group_ranks(group)),
    )
