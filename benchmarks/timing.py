"""Seconds, peaks and counts, and what many repetitions of them say."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slime_instrument._dump import exchange

__all__ = ["Collectives", "Connections", "Figure", "PeakMemory", "Stopwatch", "machine"]

_COMMUNICATING = (
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier",
    "recv", "reduce", "reduce_scatter", "scatter", "send",
)  # fmt: skip


@dataclass
class Stopwatch:
    """Seconds by phase. ``total`` is what :meth:`whole` enclosed."""

    total: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def whole(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.total = time.perf_counter() - began

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - began

    @contextmanager
    def around(self, owner: Any, attribute: str, name: str) -> Iterator[None]:
        """Time every call of ``owner.attribute`` inside the block as phase ``name``."""
        original = getattr(owner, attribute)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return original(*args, **kwargs)

        setattr(owner, attribute, timed)
        try:
            yield
        finally:
            setattr(owner, attribute, original)


class Collectives:
    """Counts what this rank does through ``torch.distributed`` inside the block, by function, and the bytes it sends to
    another rank."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.bytes_sent = 0
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> Collectives:
        for name in _COMMUNICATING:
            original = self._originals[name] = getattr(dist, name)
            setattr(dist, name, self._counting(name, original))
        return self

    def __exit__(self, *_failure: object) -> None:
        for name, original in self._originals.items():
            setattr(dist, name, original)

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def _counting(self, name: str, original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] = self.counts.get(name, 0) + 1
            if name in ("isend", "send"):
                self.bytes_sent += args[0].numel() * args[0].itemsize
            return original(*args, **kwargs)

        return counted


class Connections:
    """Counts, inside the block, what this rank sends over sockets of this package's own: connections that it opens,
    pieces, and bytes."""

    def __init__(self) -> None:
        self.connections = self.pieces = self.bytes_sent = 0
        self._connect, self._send = exchange._connect, exchange._send_piece

    def __enter__(self) -> Connections:
        exchange._connect, exchange._send_piece = self._connecting, self._sending
        return self

    def __exit__(self, *_failure: object) -> None:
        exchange._connect, exchange._send_piece = self._connect, self._send

    def _connecting(self, *args: Any) -> Any:
        self.connections += 1
        return self._connect(*args)

    def _sending(self, line: Any, piece: memoryview, patience: Any) -> None:
        self.pieces += 1
        self.bytes_sent += len(piece)
        self._send(line, piece, patience)


class PeakMemory:
    """How far the resident memory of this process rises above its start inside the block, in bytes (Linux only)."""

    growth: int | None = None
    _before: int | None = None

    def __enter__(self) -> PeakMemory:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            self._before = _status("VmRSS")
        except (OSError, KeyError):
            self._before = None
        return self

    def __exit__(self, *_failure: object) -> None:
        if self._before is not None:
            self.growth = max(0, _status("VmHWM") - self._before)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


@dataclass(frozen=True)
class Figure:
    """Several measurements of one thing: median, and the middle half of them."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        ordered = sorted(values)
        quarters = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else [ordered[0]] * 3
        return cls(statistics.median(ordered), quarters[0], quarters[2], len(ordered))

    def as_dict(self) -> dict[str, float]:
        return {"median": self.median, "q1": self.low, "q3": self.high, "n": self.count}

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}–{self.high:.3f})"


def machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores"
