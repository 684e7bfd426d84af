"""Who this rank is, and what its hooks saw of a rollout. Without torch: hooks are there before slime is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

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
        """Tensor-parallel ranks hold the same token values, and earlier stages none of the computed ones."""
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
    """This rank's place as Megatron has it now; no communication."""
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


@dataclass(frozen=True)
class Seen:
    """What the hooks know of the rollout that is dumped.

    Attributes:
        failure: why a part of this rollout is missing, where one is; its dump is refused then.
        log_probs: captured log-probs by local sample, shape ``(local response tokens,)`` each; None for a sample that
            the loss never saw. None as a whole where nothing was captured.
        optimizer_steps: by local sample, the optimizer step of the rollout at which it was captured.
        came_with_rollout: fields that ``rollout_data`` held when training began.
        captured_by_slime: slime itself added log-probs of the training forward (since #2266).
        positions_from: "partition", "reconstructed" or "unknown".
        route: how this process was armed, in words.
        why_no_log_probs: why ``log_probs`` is absent, for the provenance; looked at only where it is.
        weight_version: the trainer's own count of weight updates, where it has one.
        step_results: of each optimizer step its number, slime's dict of losses, and the gradient's norm.
    """

    failure: str | None = None
    log_probs: Sequence[torch.Tensor | None] | None = None
    optimizer_steps: Sequence[int | None] | None = None
    came_with_rollout: frozenset[str] = frozenset()
    captured_by_slime: bool = False
    positions_from: str = "unknown"
    route: str = ""
    why_no_log_probs: str = ""
    weight_version: int | None = None
    step_results: Sequence[tuple[int | None, Any, Any]] = ()
