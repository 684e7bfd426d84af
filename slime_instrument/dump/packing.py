"""Many tensors as few flat ones, and those as a stream of byte buckets. Pure: no ranks, no communication.

A :class:`Packer` replaces each tensor by a :class:`Ref` and queues it under a (section, dtype) pair. ``buckets`` turns
the queues into byte tensors of at most a given size, on the CPU; tensors that live on a device are put together there
and leave it once per bucket. :class:`Flats` is the other end: flat buffers that the buckets fill in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

__all__ = ["Flats", "Packer", "Ref", "StreamKey"]

StreamKey = tuple[str, torch.dtype]
"""Section and dtype. One stream becomes one flat tensor, so that a file holds few storages."""


@dataclass(frozen=True)
class Ref:
    """A packed tensor: which flat tensor, where in it (in elements), and its shape."""

    key: StreamKey
    start: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return int(torch.Size(self.shape).numel())


@dataclass
class Packer:
    """Collects tensors in the order in which they are added."""

    streams: dict[StreamKey, list[torch.Tensor]] = field(default_factory=dict)
    sizes: dict[StreamKey, int] = field(default_factory=dict)

    def add(self, section: str, tensor: torch.Tensor) -> Ref:
        key = (section, tensor.dtype)
        start = self.sizes.get(key, 0)
        self.sizes[key] = start + tensor.numel()
        self.streams.setdefault(key, []).append(tensor.detach())
        return Ref(key, start, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return sum(size * key[1].itemsize for key, size in self.sizes.items())

    def buckets(self, limit: int) -> Iterator[torch.Tensor]:
        """uint8 tensors on the CPU, each of ``limit`` bytes but the last. Valid until the next one is asked for."""
        limit = max(1, min(limit, self.nbytes))
        bucket = torch.empty(limit, dtype=torch.uint8)
        filled = 0
        for run in _runs(self._pieces(limit), limit):
            taken = 0
            packed = torch.cat(run) if len(run) > 1 else run[0]  # on its own device
            while taken < packed.numel():
                count = min(limit - filled, packed.numel() - taken)
                bucket[filled : filled + count].copy_(packed[taken : taken + count])
                filled, taken = filled + count, taken + count
                if filled == limit:
                    yield bucket
                    filled = 0
        if filled:
            yield bucket[:filled]

    def flats(self) -> Flats:
        """The same tensors as flat ones on this rank, without the way through buckets."""
        flats = Flats(self.sizes)
        for key, tensors in self.streams.items():
            flat, start = flats.buffers[key], 0
            for run in _runs((t.reshape(-1) for t in tensors), flat.numel()):
                packed = torch.cat(run) if len(run) > 1 else run[0]
                flat[start : start + packed.numel()].copy_(packed)
                start += packed.numel()
        return flats

    def _pieces(self, limit: int) -> Iterator[torch.Tensor]:
        for tensors in self.streams.values():
            for tensor in tensors:
                if tensor.numel():
                    # A piece above the limit would be doubled on its device by the cat below; cut it first.
                    yield from tensor.contiguous().reshape(-1).view(torch.uint8).split(limit)


def _runs(pieces: Iterator[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Neighbours on the same device, together at most ``limit`` elements (or a single piece)."""
    run: list[torch.Tensor] = []
    size = 0
    for piece in pieces:
        if run and (piece.device != run[0].device or size + piece.numel() > limit):
            yield run
            run, size = [], 0
        run.append(piece)
        size += piece.numel()
    if run:
        yield run


class Flats:
    """One flat CPU tensor per stream, filled byte by byte in stream order."""

    def __init__(self, sizes: dict[StreamKey, int]) -> None:
        self.buffers = {key: torch.empty(size, dtype=key[1]) for key, size in sizes.items()}
        self._targets = [buffer.view(torch.uint8) for buffer in self.buffers.values() if buffer.numel()]
        self._filled = 0

    def feed(self, bucket: torch.Tensor) -> None:
        """Take the next bytes. ValueError when they are more than what is expected."""
        taken = 0
        while taken < bucket.numel():
            if not self._targets:
                raise ValueError(f"{bucket.numel() - taken} bytes more than announced")
            target = self._targets[0]
            count = min(target.numel() - self._filled, bucket.numel() - taken)
            target[self._filled : self._filled + count].copy_(bucket[taken : taken + count])
            self._filled, taken = self._filled + count, taken + count
            if self._filled == target.numel():
                self._targets.pop(0)
                self._filled = 0

    def tensor(self, ref: Ref) -> torch.Tensor:
        """The packed tensor, as a view of its flat one."""
        return self.buffers[ref.key][ref.start : ref.start + ref.numel].view(ref.shape)
