"""Undo zigzag context parallelism: which response indices a rank holds, and where its bytes belong.

A sequence of ``total`` tokens is padded to ``2 * cp`` equal chunks; rank r owns chunks r and ``2 * cp - 1 - r``: then
causal attention is balanced. The log-prob of response index i stands at logits position ``prompt - 1 + i``, and the
last position has none. A shard holds the front chunk's response indices, then the back chunk's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from slime_instrument._errors import DumpError

if TYPE_CHECKING:
    from slime_instrument._dump.contribute import Description, Sharded, StreamKey


class Run(NamedTuple):
    """A contiguous stretch of a shard: from element ``source`` of the rank's concatenated shards to element
    ``target`` of the concatenated full responses."""

    source: int
    target: int
    length: int


def owned(total: int, response: int, cp: int, rank: int, padded: int | None = None) -> tuple[range, range]:
    """Response indices that ``rank`` holds: of its front chunk, then of its back chunk.

    ``padded``: the length that the chunks are cut from where it is not ``total`` itself (the bshd layout pads a
    micro-batch to its longest sample). ``cp`` 1 holds everything, index 0 of a sample without a prompt included.
    """
    if cp == 1:
        return range(response), range(0)
    chunk = -(-(total if padded is None else padded) // (2 * cp))
    first_position = total - response - 1  # the logits position of response index 0; -1 without a prompt

    def cut(index: int) -> range:
        start = max(index * chunk, first_position, 0)
        end = min((index + 1) * chunk, total - 1)
        return range(start - first_position, end - first_position) if start < end else range(0)

    return cut(rank), cut(2 * cp - 1 - rank)


def shard_lengths(
    totals: Sequence[int], responses: Sequence[int], cp: int, rank: int, padded: Sequence[int] | None = None
) -> list[int]:
    """How many log-probs of each sample ``rank`` holds."""
    paddings = padded if padded is not None else [None] * len(totals)
    return [
        sum(map(len, owned(total, response, cp, rank, pad)))
        for total, response, pad in zip(totals, responses, paddings, strict=True)
    ]


def runs(
    totals: Sequence[int], responses: Sequence[int], cp: int, rank: int, padded: Sequence[int] | None = None
) -> list[Run]:
    """The rank's shard as contiguous runs, in shard order; at most two per sample, none of length 0.

    One list serves every field of the batch.
    """
    found: list[Run] = []
    source = offset = 0
    paddings = padded if padded is not None else [None] * len(totals)
    for total, response, pad in zip(totals, responses, paddings, strict=True):
        for piece in owned(total, response, cp, rank, pad):
            if len(piece):
                found.append(Run(source, offset + piece.start, len(piece)))
                source += len(piece)
        offset += response
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Putting the parts of one data-parallel rank together


class Restoring:
    """One data-parallel rank's bytes on their way into the file's own tensors.

    Where every byte belongs is decided once, from the descriptions of its context-parallel ranks. Bytes then go
    straight from the buffer that they came in to their place, so that the writer never holds a rank's part beside the
    restored one. A part is contiguous in the whole response but for the two chunks, which makes restoring a handful of
    memory copies per sample and no arithmetic per token.

    ``fields``: restored field -> one tensor per sample, shape ``(response, *tail)``; valid once all bytes are there. Or
    what stands for a tensor in a file.
    ``flats``: the tensors that all context-parallel ranks have alike, one per stream. ``left_out``: field -> why its
    parts do not make a whole; that field is missing, the others are not.
    """

    def __init__(self, parts: Mapping[int, Description], cp: int, cp_fields: Sequence[str]) -> None:
        missing = [rank for rank in range(cp) if rank not in parts]
        if missing:
            raise DumpError(f"context-parallel rank(s) {missing} contributed nothing")
        self.head = parts[0]
        self._cp = cp
        self._parts = parts
        self._targets: dict[int, dict[StreamKey, _Target]] = {rank: {} for rank in parts}
        self._add_zero: list[torch.Tensor] = []
        self._known_runs: dict[tuple[int, tuple[int, ...], int], tuple[list[Run], list[int]]] = {}
        self.fields: dict[str, list[Any]] = {}
        self.flats: dict[StreamKey, torch.Tensor] = {}
        self.left_out: dict[str, str] = {}
        for key, size in self.head.sizes.items():
            if key[0] == "":
                self.flats[key] = torch.empty(size, dtype=key[1], device="cpu")
                self._targets[0][key] = _straight(self.flats[key])
        for rank, part in parts.items():
            if (part.total_lengths, part.response_lengths) != (self.head.total_lengths, self.head.response_lengths):
                raise DumpError(f"context-parallel rank {rank} has other samples than rank 0")
        for name in cp_fields:
            holders = {rank: part.sharded[name] for rank, part in parts.items() if name in part.sharded}
            if holders:
                try:
                    self._place(name, holders)
                except DumpError as error:
                    self.left_out[name] = str(error)

    def sink(self, context_rank: int) -> Sink:
        """Where that rank's bytes go. Those of a field that is not restored from it are dropped."""
        targets = self._targets[context_rank]
        return Sink(
            [
                targets.get(key) or _Target(size * key[1].itemsize, None, (), ())
                for key, size in self._parts[context_rank].sizes.items()
            ]
        )

    def finish(self) -> None:
        """Call it once, when all bytes are there."""
        for whole in self._add_zero:
            # slime's native dump sums zero-padded shards, and -0.0 + 0.0 is 0.0: PPO's kl comes out with other bits.
            whole.add_(0.0)

    def _place(self, name: str, holders: Mapping[int, Sequence[Sharded]]) -> None:
        kinds = {rank: [(one.key, one.samples) for one in groups] for rank, groups in holders.items()}
        first = next(iter(holders))
        if any(kind != kinds[first] for kind in kinds.values()):
            raise DumpError("has another dtype or shape on another context-parallel rank")
        whole_on = next((rank for rank, groups in holders.items() if any(one.full for one in groups)), None)
        if self._cp == 1:
            whole_on = 0
        if whole_on is None and len(holders) < self._cp:
            raise DumpError(f"is missing on context-parallel rank(s) {sorted(set(range(self._cp)) - set(holders))}")
        if whole_on is not None and any(one.full is False for groups in holders.values() for one in groups):
            raise DumpError(f"is whole on context-parallel rank {whole_on} and a shard on another")
        placed: dict[int, Any] = dict(self.head.in_files.get(name, {}))
        targets: dict[int, dict[StreamKey, _Target]] = {rank: {} for rank in holders}
        for number, (key, samples) in enumerate(kinds[first]):
            whole = self._place_kind(key, samples, {r: g[number] for r, g in holders.items()}, whole_on, targets)
            views = torch.split(whole, [self.head.response_lengths[i] for i in samples])
            placed.update(zip(samples, views, strict=True))
        if len(placed) < len(self.head.response_lengths):
            raise DumpError("is in files for some samples, and missing on context-parallel rank 0")
        for rank, of_rank in targets.items():
            self._targets[rank].update(of_rank)
        self.fields[name] = [placed[i] for i in range(len(self.head.response_lengths))]

    def _place_kind(
        self,
        key: StreamKey,
        samples: tuple[int, ...],
        holders: Mapping[int, Sharded],
        whole_on: int | None,
        targets: dict[int, dict[StreamKey, _Target]],
    ) -> torch.Tensor:
        """The tensor for the samples of one dtype and shape, with the targets that fill it."""
        _, dtype, tail = key
        count = sum(self.head.response_lengths[i] for i in samples)
        cuts = {rank: self._runs(rank, samples) for rank in (holders if whole_on is None else ())}
        for rank, held in holders.items():
            expected = count if whole_on is not None else sum(run.length for run in cuts[rank])
            if sum(held.lengths) != expected:
                raise DumpError(
                    f"of context-parallel rank {rank} holds {sum(held.lengths)} values; rank 0's lengths make it "
                    f"{expected}"
                )
        whole = torch.empty(count, *tail, dtype=dtype, device="cpu")
        row = dtype.itemsize * int(torch.Size(tail).numel())
        if whole_on is not None:
            targets[whole_on][key] = _straight(whole)
            return whole
        if sum(run.length for cut in cuts.values() for run in cut) < count:
            # A token that no rank owns has no value; 0.0 would be a log-prob.
            if dtype in _FILLABLE:
                whole.fill_(float("nan") if dtype.is_floating_point or dtype.is_complex else 0)
            else:
                bytes_of(whole)[:] = bytes(count * row)
        if self._cp > 1 and dtype in _FILLABLE and dtype.is_floating_point:
            self._add_zero.append(whole)
        for rank in cuts:
            in_bytes, sources = self._runs_in_bytes(rank, samples, row)
            targets[rank][key] = _Target(sum(holders[rank].lengths) * row, bytes_of(whole), in_bytes, sources)
        return whole

    def _runs(self, rank: int, samples: tuple[int, ...]) -> list[Run]:
        """Worked out once: nearly always all fields hold the same samples."""
        known = self._known_runs.get((rank, samples, 1))
        if known is None:
            totals, responses, padded = self.head.total_lengths, self.head.response_lengths, self.head.padded
            if len(samples) < len(totals):
                totals, responses = [totals[i] for i in samples], [responses[i] for i in samples]
                padded = None if padded is None else [padded[i] for i in samples]
            found = runs(totals, responses, self._cp, rank, padded)
            known = self._known_runs[rank, samples, 1] = found, [run.source for run in found]
        return known[0]

    def _runs_in_bytes(self, rank: int, samples: tuple[int, ...], row: int) -> tuple[list[Run], list[int]]:
        """:meth:`_runs` in bytes, and where each begins in the shard."""
        known = self._known_runs.get((rank, samples, row))
        if known is None:
            scaled = [Run(start * row, target * row, n * row) for start, target, n in self._runs(rank, samples)]
            known = self._known_runs[rank, samples, row] = scaled, [run.source for run in scaled]
        return known


_FILLABLE = frozenset(
    {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128}
    | {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}
)
"""Dtypes that torch can fill and add; the others are only moved."""


@dataclass(frozen=True)
class _Target:
    """One stream of a rank: ``size`` bytes that go to ``memory``, or nowhere. ``runs`` in bytes, by source."""

    size: int
    memory: memoryview | None
    runs: Sequence[Run]
    sources: Sequence[int]

    def take(self, at: int, data: memoryview) -> None:
        """Bytes ``at`` and following of this stream."""
        if self.memory is None:
            return
        end = at + len(data)
        for source, target, length in self.runs[max(0, bisect_right(self.sources, at) - 1) :]:
            if source >= end:
                break
            first, last = max(source, at), min(source + length, end)
            if first < last:
                start = target + first - source
                self.memory[start : start + last - first] = data[first - at : last - at]


class Sink:
    """Takes one rank's bytes, in stream order and in pieces of any size."""

    def __init__(self, targets: Sequence[_Target]) -> None:
        self._targets = [target for target in targets if target.size]
        self._current = self._at = 0
        self.missing = sum(target.size for target in self._targets)

    def feed(self, data: memoryview) -> None:
        """ValueError when ``data`` holds more than what was announced."""
        while len(data):
            if self._current == len(self._targets):
                raise ValueError(f"{len(data)} bytes more than announced")
            target = self._targets[self._current]
            count = min(target.size - self._at, len(data))
            target.take(self._at, data[:count])
            data, self._at = data[count:], self._at + count
            self.missing -= count
            if self._at == target.size:
                self._current, self._at = self._current + 1, 0


def _straight(whole: torch.Tensor) -> _Target:
    size = whole.numel() * whole.dtype.itemsize
    return _Target(size, bytes_of(whole), (Run(0, 0, size),), (0,))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    buffer: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(buffer)
