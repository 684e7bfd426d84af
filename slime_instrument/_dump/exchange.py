"""Bring every rank's contribution to the writer, each byte once, and into place there while more is on its way."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slime_instrument._dump.agreement import Agreement
from slime_instrument._dump.restore import Restorer, Shard
from slime_instrument._dump.shard import Contribution, Manifest
from slime_instrument._dump.topology import Topology
from slime_instrument._dump.transport import Receiving, Transport

__all__ = ["Announcement", "message_bytes", "own_shard", "receive_all", "send_own"]

_PIECES = 4
_SMALL = 1 << 20


@dataclass(frozen=True)
class Announcement:
    """What the writer must know before it can receive: sizes in bytes, and how the sender cuts its stream."""

    manifest: int
    payload: int
    message: int

    def encode(self) -> str:
        return f"{self.manifest},{self.payload},{self.message}"

    @classmethod
    def decode(cls, text: str) -> Announcement:
        return cls(*map(int, text.split(",")))

    def messages(self) -> list[int]:
        """Sizes of the messages that carry the payload, in order: full ones, then the rest."""
        full, rest = divmod(self.payload, self.message)
        return [self.message] * full + [rest] * bool(rest)


def message_bytes(payload: int, bucket_bytes: int, device: torch.device) -> int:
    """How a sender cuts its stream: at most a bucket, and in a few pieces where it is long, so that packing, travelling
    and restoring overlap. On a device, a message and the tensors that are joined for it share the bucket."""
    most = bucket_bytes if device.type == "cpu" else bucket_bytes // 2
    return max(1, min(most, payload, max(_SMALL, -(-payload // _PIECES))))


def own_shard(contribution: Contribution, topology: Topology, cp_fields: Sequence[str]) -> list[Shard]:
    """A rank that is alone: nothing travels."""
    restorer = Restorer([contribution.manifest], topology.context_parallel, cp_fields)
    _feed_own(contribution, restorer)
    return restorer.shards()


def send_own(
    contribution: Contribution, topology: Topology, agreement: Agreement, transport: Transport, bucket_bytes: int
) -> None:
    """A rank that does not write: agree, then send its own part and nothing else."""
    manifest = torch.frombuffer(bytearray(pickle.dumps(contribution.manifest)), dtype=torch.uint8)
    payload = contribution.packer.nbytes
    message = message_bytes(payload, bucket_bytes, transport.device)
    agreement.ready(Announcement(manifest.numel(), payload, message).encode())
    transport.send(manifest, topology.writer)
    unsent = payload
    try:
        for piece in contribution.packer.buckets(message, transport.device):
            unsent -= piece.numel()
            transport.send(piece, topology.writer)
    except Exception as error:
        # Counted out, not broken off: the writer would wait in vain, and its process group would not survive that.
        agreement.spoil(f"{type(error).__name__}: {error}")
        while unsent:
            filler = torch.zeros(min(message, unsent), dtype=torch.uint8)
            unsent -= filler.numel()
            transport.send(filler, topology.writer)
        raise


def receive_all(
    contribution: Contribution,
    topology: Topology,
    agreement: Agreement,
    transport: Transport,
    cp_fields: Sequence[str],
) -> list[Shard]:
    """The writer: everybody's part put together, its own among them.

    The memory that messages land in is taken before the others are told to start. When something fails after that, the
    rest is still received and dropped, so that nobody is left sending.
    """
    announced = {rank: Announcement.decode(text) for rank, text in agreement.gather_sizes().items()}
    largest = max((max(sizes.manifest, sizes.message) for sizes in announced.values()), default=0)
    landings = [torch.empty(largest, dtype=torch.uint8) for _ in range(2)]
    agreement.go()
    assembling = _Assembling(contribution, topology.context_parallel, cp_fields)
    # All manifests come before any payload: together they decide where each byte belongs.
    for rank, sizes in announced.items():
        transport.receive(landings[0][: sizes.manifest], rank)
        assembling.attempt(assembling.take_manifest, rank, landings[0][: sizes.manifest])
    payload = _Arrivals(transport, landings, [(rank, n) for rank, sizes in announced.items() for n in sizes.messages()])
    assembling.attempt(assembling.take_own)  # while the first message travels
    for rank, data in payload:
        assembling.attempt(assembling.take_payload, rank, data)
    assembling.attempt(agreement.refuse_spoilt)
    shards = assembling.finish()
    agreement.forget()
    return shards


class _Arrivals:
    """Messages in the order in which they are expected, the next one on its way while this one is looked at."""

    def __init__(
        self, transport: Transport, landings: Sequence[torch.Tensor], expected: Sequence[tuple[int, int]]
    ) -> None:
        self._transport, self._landings, self._expected = transport, deque(landings), deque(expected)
        self._under_way: deque[tuple[int, Receiving]] = deque()
        self._start_next()

    def _start_next(self) -> None:
        if self._expected:
            rank, size = self._expected.popleft()
            landing = self._landings[0][:size]
            self._landings.rotate()
            self._under_way.append((rank, self._transport.start_receiving(landing, rank)))

    def __iter__(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Sender and bytes; the bytes are valid until the next but one."""
        while self._under_way:
            rank, receiving = self._under_way.popleft()
            data = receiving.wait()
            self._start_next()
            yield rank, data


class _Assembling:
    """What the writer has so far, and the first thing that went wrong."""

    def __init__(self, contribution: Contribution, cp: int, cp_fields: Sequence[str]) -> None:
        self._own, self._cp, self._cp_fields = contribution, cp, cp_fields
        self._manifests: dict[int, Manifest] = {}
        self._failure: Exception | None = None

    def attempt(self, step: Callable[..., None], *arguments: Any) -> None:
        """Do ``step``, unless something failed before."""
        if self._failure is None:
            try:
                step(*arguments)
            except Exception as error:
                self._failure = error

    def take_manifest(self, rank: int, data: torch.Tensor) -> None:
        self._manifests[rank] = pickle.loads(data.numpy().tobytes())

    def take_own(self) -> None:
        self._restorer = Restorer([self._own.manifest, *self._manifests.values()], self._cp, self._cp_fields)
        self._sinks = {rank: self._restorer.sink(manifest) for rank, manifest in self._manifests.items()}
        _feed_own(self._own, self._restorer)

    def take_payload(self, rank: int, data: torch.Tensor) -> None:
        self._sinks[rank].feed(data)

    def finish(self) -> list[Shard]:
        """The shards; raises what went wrong."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # its traceback leads here: a circle would keep everything that arrived
        for sink in self._sinks.values():
            sink.finish()
        return self._restorer.shards()


def _feed_own(contribution: Contribution, restorer: Restorer) -> None:
    sink = restorer.sink(contribution.manifest)
    for piece in contribution.packer.pieces(_SMALL):
        sink.feed(piece.cpu())
    sink.finish()
