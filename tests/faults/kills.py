"""SIGKILL at random moments of writing over an existing dump: ``python -m tests.faults.kills [COUNT]``.

A forked writer saves a dump of a few MB over and over; it is killed, the file in its place is read whole, and what the
writer left beside it is cleaned as the next run would. Exit status 1 when a file was ever torn or a leftover stayed.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime_instrument._dump.file import Disk, clean_leftovers

__all__ = ["Tally", "kill_writers"]

_DISK = Disk(print)
_ELEMENTS = 1 << 19
"""Of float32: 2 MB."""


@dataclass
class Tally:
    kills: int = 0
    torn: int = 0
    while_writing: int = 0
    """Kills that left an unfinished part beside the file."""
    versions: int = 0
    """How often the file in place was another one than before the kill."""
    strays: int = 0
    """Kills after which the next run's cleaning left something."""

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.while_writing} of them with a file half written, {self.versions} after a "
            f"rename: {self.torn} torn files, {self.strays} strays"
        )


def kill_writers(folder: Path, count: int, seed: int = 0) -> Tally:
    """Kill ``count`` writers of one file in ``folder``, each at a moment within its first three writes or so."""
    path, chance, tally = folder / "0.pt", random.Random(seed), Tally()
    _DISK.write(path, _dump(-1))
    began = time.monotonic()
    for number in range(3):
        _DISK.write(path, _dump(-1 - number))
    span = time.monotonic() - began
    before = _read(path)
    for number in range(count):
        child = _fork(lambda number=number: _write_for_ever(path, number * 1000))  # type: ignore[misc]
        time.sleep(chance.uniform(0.0, span))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        tally.kills += 1
        after = _read(path)
        tally.torn += after is None
        tally.versions += after != before
        before = after
        tally.while_writing += bool(clean_leftovers(folder))
        tally.strays += os.listdir(folder) != [path.name]
    return tally


def _dump(number: int) -> Callable[[Any], None]:
    return lambda file: torch.save({"samples": [torch.full((_ELEMENTS,), float(number))]}, file)


def _read(path: Path) -> float | None:
    """The number that the dump is full of; None where it is not a whole dump."""
    try:
        values = torch.load(path, weights_only=True)["samples"][0]
    except Exception:
        return None
    return float(values[0]) if values.numel() == _ELEMENTS and bool((values == values[0]).all()) else None


def _write_for_ever(path: Path, number: int) -> None:
    while True:
        number += 1
        _DISK.write(path, _dump(number))


def _fork(work: Callable[[], None]) -> int:
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(1)
    return child


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.kills", description=__doc__)
    parser.add_argument("count", type=int, nargs="?", default=200, help="how many writers to kill (default 200)")
    count = parser.parse_args().count
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tally = kill_writers(Path(folder), count)
    print(tally)
    return int(bool(tally.torn or tally.strays))


if __name__ == "__main__":
    sys.exit(main())
