"""Many tensors as few flat ones, and those as a stream of byte buckets. Pure: no ranks, no communication.

A :class:`Packer` replaces each tensor by a :class:`Ref` and queues it under a (section, dtype) pair. ``buckets`` turns
the queues into byte tensors of at most a given size; tensors that live on a device are put together there and leave it
once per bucket. :class:`Flats` is the other end: flat buffers that the buckets fill in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

__all__ = ["Flats", "Packer", "Ref", "StreamKey"]

StreamKey = tuple[str, torch.dtype]
"""Section and dtype. One stream becomes one flat tensor, so that a file holds few storages."""

CPU = torch.device("cpu")
# On the CPU tensors are joined in steps that stay in the processor's cache, then copied into the bucket.
_CACHED_BYTES = 1 << 20


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
        """Queue one tensor; the result stands for it."""
        key = (section, tensor.dtype)
        start = self.sizes.get(key, 0)
        self.sizes[key] = start + tensor.numel()
        self.streams.setdefault(key, []).append(tensor)
        return Ref(key, start, tuple(tensor.shape))

    def add_all(self, section: str, tensors: Sequence[torch.Tensor]) -> None:
        """Queue tensors of one dtype that nobody will ask for one by one."""
        if tensors:
            key = (section, tensors[0].dtype)
            self.sizes[key] = self.sizes.get(key, 0) + sum(tensor.numel() for tensor in tensors)
            self.streams.setdefault(key, []).extend(tensors)

    @property
    def nbytes(self) -> int:
        return sum(size * key[1].itemsize for key, size in self.sizes.items())

    def buckets(self, limit: int, device: torch.device = CPU) -> Iterator[torch.Tensor]:
        """uint8 tensors on ``device``, each of ``limit`` bytes but the last. Valid until the next one is asked for.

        On a device, ``limit`` bytes are taken for the tensors that are being joined, and as many again where
        ``device`` is that device.
        """
        limit = max(1, min(limit, self.nbytes))
        bucket = torch.empty(limit, dtype=torch.uint8, device=device)
        filled = 0
        for packed in self.pieces(limit):
            taken = 0
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
        """The same tensors as flat ones on this rank."""
        flats = Flats(self.sizes)
        for piece in self.pieces(_CACHED_BYTES):
            flats.feed(piece.cpu())
        return flats

    def pieces(self, limit: int) -> Iterator[torch.Tensor]:
        """All bytes in stream order as uint8 tensors of at most ``limit`` bytes, each where its tensors are: neighbours
        on one device are joined there."""
        for key, tensors in self.streams.items():
            for run in _runs(tensors, limit // key[1].itemsize, _CACHED_BYTES // key[1].itemsize):
                with torch.no_grad():
                    whole = torch.cat(run) if len(run) > 1 else run[0].detach().contiguous()
                yield from torch.split(whole.view(torch.uint8), limit)


def _runs(tensors: Iterable[torch.Tensor], on_device: int, on_cpu: int) -> Iterator[list[torch.Tensor]]:
    """Flat neighbours on the same device, together at most that many elements. A tensor above that is cut."""
    run: list[torch.Tensor] = []
    room = 0
    for tensor in tensors:
        count = tensor.numel()
        if not count:
            continue
        flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
        if not run or count > room or flat.device != run[0].device:
            if run:
                yield run
                run = []
            room = max(1, on_cpu if flat.device.type == "cpu" else on_device)
            if count > room:
                yield from ([piece] for piece in torch.split(flat, room))
                continue
        run.append(flat)
        room -= count
    if run:
        yield run


class Flats:
    """One flat CPU tensor per stream, filled byte by byte in stream order."""

    def __init__(self, sizes: dict[StreamKey, int]) -> None:
        self.buffers = {key: torch.empty(size, dtype=key[1]) for key, size in sizes.items()}
        self._targets = list(self.in_bytes())
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

    def in_bytes(self) -> Iterator[torch.Tensor]:
        """The buffers as uint8 views, in stream order; empty ones left out."""
        for buffer in self.buffers.values():
            if buffer.numel():
                yield buffer.view(torch.uint8)

    def tensor(self, ref: Ref) -> torch.Tensor:
        """The packed tensor, as a view of its flat one."""
        return self.buffers[ref.key][ref.start : ref.start + ref.numel].view(ref.shape)
