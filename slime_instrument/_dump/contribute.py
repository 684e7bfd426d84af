"""What the hooks hand to a dump, and who this rank is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slime_instrument._dump.topology import Topology as Topology
from slime_instrument._dump.topology import megatron_is_up as megatron_is_up
from slime_instrument._dump.topology import read_topology as read_topology


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
