"""Where every arriving byte belongs: decided once from the manifests, before any payload is there. Pure.

Bytes go straight from the bucket that they came in to their place in the file's own tensors, so that the writer never
holds a rank's part beside the restored one. A shard's pieces are contiguous in the whole response (zigzag runs), which
makes restoring a handful of memory copies per sample and no arithmetic per token.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slime_instrument._dump.packing import Flats, StreamKey
from slime_instrument._dump.shard import COMMON, Manifest, ShardedField
from slime_instrument._dump.zigzag import Run, runs
from slime_instrument._errors import DumpError

__all__ = ["DataRank", "Sink"]


@dataclass(frozen=True)
class _Stream:
    """One stream of a contribution: ``size`` bytes that go to ``target``, or nowhere. ``runs`` in bytes, by source."""

    size: int
    target: memoryview | None
    runs: Sequence[Run]
    sources: Sequence[int]

    def take(self, at: int, data: memoryview) -> None:
        """Bytes ``at`` and following of this stream."""
        if self.target is None:
            return
        end = at + len(data)
        for source, target, length in self.runs[max(0, bisect_right(self.sources, at) - 1) :]:
            if source >= end:
                break
            first, last = max(source, at), min(source + length, end)
            if first < last:
                start = target + first - source
                self.target[start : start + last - first] = data[first - at : last - at]


class Sink:
    """Takes one rank's bytes, in stream order and in pieces of any size."""

    def __init__(self, streams: Sequence[_Stream]) -> None:
        self._streams = [stream for stream in streams if stream.size]
        self._current = self._at = 0

    def feed(self, bucket: torch.Tensor) -> None:
        """``bucket``: uint8 on the CPU. ValueError when it holds more than what was announced."""
        data = _bytes_of(bucket)
        while len(data):
            if self._current == len(self._streams):
                raise ValueError(f"{len(data)} bytes more than announced")
            stream = self._streams[self._current]
            count = min(stream.size - self._at, len(data))
            stream.take(self._at, data[:count])
            data, self._at = data[count:], self._at + count
            if self._at == stream.size:
                self._current, self._at = self._current + 1, 0

    def finish(self) -> None:
        """ValueError when bytes are missing."""
        if self._current < len(self._streams):
            raise ValueError(f"stream {self._current + 1} of {len(self._streams)} ended after {self._at} bytes")


class DataRank:
    """One data-parallel rank's samples while they are put together. ``manifests``: context-parallel rank -> its own.

    Raises :class:`DumpError` naming the field and the ranks where the manifests do not make a whole.
    """

    def __init__(self, manifests: Mapping[int, Manifest], cp: int, cp_fields: Sequence[str]) -> None:
        missing = [rank for rank in range(cp) if rank not in manifests]
        if missing:
            raise DumpError(f"context-parallel rank(s) {missing} contributed nothing")
        self.head = manifests[0]
        assert self.head.common is not None
        self._common = Flats({key: size for key, size in self.head.sizes.items() if key[0] == COMMON})
        lengths = self.head.common["total_lengths"], self.head.common["response_lengths"]
        self._responses = list(lengths[1])
        padded = self.head.common.get("max_seq_lens") if self.head.provenance.get("qkv_format") == "bshd" else None
        self._runs = {rank: runs(*lengths, cp, rank, padded) for rank in range(cp)}
        self._scaled: dict[tuple[int, int], tuple[list[Run], list[int]]] = {}
        self._streams: dict[int, dict[StreamKey, _Stream]] = {rank: {} for rank in manifests}
        self._whole: dict[str, torch.Tensor] = {}
        self._restored: list[str] = []
        for key, buffer in self._common.buffers.items():
            self._streams[0][key] = _straight(buffer)
        for name in cp_fields:
            holders = {rank: m.sharded[name] for rank, m in manifests.items() if name in m.sharded}
            if holders:
                self._plan_field(name, holders, cp)
        self._sizes = {rank: manifest.sizes for rank, manifest in manifests.items()}

    def sink(self, context_rank: int) -> Sink:
        """Where that rank's bytes go. A field that this rank was not told to restore is dropped."""
        streams = self._streams[context_rank]
        return Sink(
            [streams.get(key) or _dropped(size * key[1].itemsize) for key, size in self._sizes[context_rank].items()]
        )

    def fields(self) -> dict[str, list[torch.Tensor]]:
        """Every response-level field: one view per sample, shape ``(response, *tail)``. Call it once all bytes are
        there."""
        for name in self._restored:
            # slime's native dump sums zero-padded shards, and -0.0 + 0.0 is 0.0: PPO's kl comes out with other bits.
            self._whole[name].add_(0.0)
        return {name: list(torch.split(whole, self._responses)) for name, whole in self._whole.items()}

    def common(self, resolve: Callable[[Any, Flats], Any]) -> dict[str, Any]:
        """What all context-parallel ranks have alike, with ``resolve(value, flats)`` putting the tensors in."""
        assert self.head.common is not None
        return {key: resolve(value, self._common) for key, value in self.head.common.items()}

    def _plan_field(self, name: str, holders: Mapping[int, ShardedField], cp: int) -> None:
        first = next(iter(holders.values()))
        if any((held.dtype, held.tail) != (first.dtype, first.tail) for held in holders.values()):
            raise DumpError(f"{name} has another dtype or shape on another context-parallel rank")
        count = sum(self._responses)
        whole = self._whole[name] = torch.empty(count, *first.tail, dtype=first.dtype)
        key = (name, first.dtype)
        full = 0 if cp == 1 else next((rank for rank, held in holders.items() if held.full), None)
        if full is None and len(holders) < cp:
            raise DumpError(f"{name} is missing on context-parallel rank(s) {sorted(set(range(cp)) - set(holders))}")
        if full is not None and any(held.full is False for held in holders.values()):
            raise DumpError(f"{name} is whole on context-parallel rank {full} and a shard on another")
        for rank, held in holders.items():
            expected = sum(run.length for run in self._runs[rank]) if full is None else count
            if sum(held.lengths) != expected:
                raise DumpError(
                    f"{name} of context-parallel rank {rank} holds {sum(held.lengths)} values; rank 0's lengths make "
                    f"it {expected}"
                )
        if full is None and sum(run.length for part in self._runs.values() for run in part) < count:
            # A token that no rank owns has no value; 0.0 would be a log-prob.
            whole.fill_(float("nan")) if first.dtype.is_floating_point else whole.zero_()
        if full is None and cp > 1 and first.dtype.is_floating_point:
            self._restored.append(name)
        row = first.dtype.itemsize * int(torch.Size(first.tail).numel())
        for rank, held in holders.items():
            if full is None:
                placed, sources = self._in_bytes(rank, row)
                self._streams[rank][key] = _Stream(sum(held.lengths) * row, _bytes_of(whole), placed, sources)
            elif rank == full:
                self._streams[rank][key] = _straight(whole)
            else:
                self._streams[rank][key] = _dropped(sum(held.lengths) * row)

    def _in_bytes(self, rank: int, row: int) -> tuple[list[Run], list[int]]:
        """The rank's runs for rows of ``row`` bytes; most fields share one answer."""
        if (rank, row) not in self._scaled:
            scaled = [Run(source * row, target * row, length * row) for source, target, length in self._runs[rank]]
            self._scaled[rank, row] = scaled, [run.source for run in scaled]
        return self._scaled[rank, row]


def _straight(target: torch.Tensor) -> _Stream:
    size = target.numel() * target.dtype.itemsize
    return _Stream(size, _bytes_of(target), (Run(0, 0, size),), (0,))


def _dropped(size: int) -> _Stream:
    return _Stream(size, None, (), ())


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    buffer: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(buffer)
