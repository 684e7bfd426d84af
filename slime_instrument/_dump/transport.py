"""How bytes get from a rank to the writer: point to point, over the process group that Megatron already has."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from slime_instrument._dump.topology import PARALLEL_STATE

__all__ = ["Receiving", "Transport", "megatron_transport"]


@dataclass
class Transport:
    """Sends and receives uint8 tensors. ``device`` is where the backend wants them: NCCL takes no CPU tensor.

    ``group`` is asked for anew for each dump: slime destroys its groups between rollouts and builds others.
    """

    group: Any
    device: torch.device
    timeout_s: float
    messages: int = 0
    bytes_sent: int = 0

    def send(self, data: torch.Tensor, to: int) -> None:
        """Send ``data`` and wait until its memory may be used again."""
        self.messages += 1
        self.bytes_sent += data.numel()
        self._wait(dist.isend(data.to(self.device), to, group=self.group))

    def start_receiving(self, buffer: torch.Tensor, source: int) -> Receiving:
        """Let the next message of ``source`` come into ``buffer``, a CPU tensor of exactly its size."""
        self.messages += 1
        landing = buffer if buffer.device == self.device else torch.empty_like(buffer, device=self.device)
        return Receiving(self, buffer, landing, dist.irecv(landing, source, group=self.group))

    def receive(self, buffer: torch.Tensor, source: int) -> None:
        self.start_receiving(buffer, source).wait()

    def _wait(self, work: Any) -> None:
        if self.device.type == "cpu":
            work.wait(timedelta(seconds=self.timeout_s))
        else:
            work.wait()  # NCCL takes its bound from the group; a wait() here only orders the stream


@dataclass(frozen=True)
class Receiving:
    """A message on its way."""

    transport: Transport
    buffer: torch.Tensor
    landing: torch.Tensor
    work: Any

    def wait(self) -> torch.Tensor:
        """The message, on the CPU."""
        self.transport._wait(self.work)
        if self.landing is not self.buffer:
            self.buffer.copy_(self.landing)
        return self.buffer


def megatron_transport(timeout_s: float) -> Transport:
    """Over gloo where Megatron made such groups, else (``--disable-gloo-process-groups``) over the training group."""
    state: Any = sys.modules[PARALLEL_STATE]
    try:
        group = state.get_data_parallel_group_gloo(with_context_parallel=True)
    except AssertionError:
        group = None
    if group is not None:
        return Transport(group, torch.device("cpu"), timeout_s)
    group = state.get_data_parallel_group(with_context_parallel=True)
    on_cpu = "gloo" in str(dist.get_backend(group))
    return Transport(group, torch.device("cpu" if on_cpu else "cuda"), timeout_s)
