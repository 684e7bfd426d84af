"""Bring every rank's contribution to the writer, each byte once."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import torch

from slime_instrument.dump.agreement import Agreement
from slime_instrument.dump.packing import Flats
from slime_instrument.dump.restore import Part
from slime_instrument.dump.shard import Contribution, Manifest
from slime_instrument.dump.topology import Topology
from slime_instrument.dump.transport import Transport

__all__ = ["Announcement", "own_part", "receive_all", "send_own"]


@dataclass(frozen=True)
class Announcement:
    """What the writer must know before it can receive: sizes in bytes, and how the sender cuts its stream."""

    manifest: int
    payload: int
    bucket: int

    def encode(self) -> str:
        return f"{self.manifest},{self.payload},{self.bucket}"

    @classmethod
    def decode(cls, text: str) -> Announcement:
        return cls(*map(int, text.split(",")))

    def messages(self) -> list[int]:
        """Sizes of the messages that follow, in order: the manifest, then full buckets, then the rest."""
        full, rest = divmod(self.payload, self.bucket) if self.payload else (0, 0)
        return [self.manifest, *[self.bucket] * full, *([rest] if rest else [])]


def own_part(contribution: Contribution) -> Part:
    """The writer's own part, which does not travel."""
    return Part(contribution.manifest, contribution.packer.flats())


def send_own(
    contribution: Contribution, topology: Topology, agreement: Agreement, transport: Transport, bucket_bytes: int
) -> None:
    """A rank that does not write: agree, then send its own part and nothing else."""
    manifest = torch.frombuffer(bytearray(pickle.dumps(contribution.manifest)), dtype=torch.uint8)
    payload = contribution.packer.nbytes
    bucket = max(1, min(bucket_bytes, payload))
    agreement.ready(Announcement(manifest.numel(), payload, bucket).encode())
    transport.send(manifest, topology.writer)
    for piece in contribution.packer.buckets(bucket):
        transport.send(piece, topology.writer)


def receive_all(
    contribution: Contribution, topology: Topology, agreement: Agreement, transport: Transport
) -> list[Part]:
    """The writer: its own part and everybody else's.

    Memory for what will arrive is taken before the others are told to start. When something fails after that, the
    rest is still received and dropped, so that nobody is left sending.
    """
    own = own_part(contribution)
    announced = {rank: Announcement.decode(text) for rank, text in agreement.gather_sizes().items()}
    largest = max((max(a.manifest, a.bucket) for a in announced.values()), default=0)
    landing = torch.empty(largest, dtype=torch.uint8)
    agreement.go()
    parts, failure = [own], None
    for rank, announcement in announced.items():
        flats = None
        for number, size in enumerate(announcement.messages()):
            message = landing[:size]
            transport.receive(message, rank)
            if failure is not None:
                continue
            try:
                if number == 0:
                    manifest: Manifest = pickle.loads(message.numpy().tobytes())
                    flats = Flats(manifest.sizes)
                    parts.append(Part(manifest, flats))
                else:
                    assert flats is not None
                    flats.feed(message)
            except Exception as error:
                failure = error
    if failure is not None:
        raise failure
    agreement.forget()
    return parts
