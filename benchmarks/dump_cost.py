"""``python -m benchmarks.dump_cost``: one dump, this package's way and slime's, in one run on the same ranks.

The two ways take turns on every repetition. A time is that of the slowest rank: training goes on when all of them are
back. Ratios are ours over slime's of the same repetition, so that a noisy machine troubles both sides alike.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import baseline, megatron_groups
from benchmarks.ranks import run_on_ranks
from benchmarks.shards import Case, rollout_data
from benchmarks.timing import Collectives, Connections, Figure, PeakMemory, Stopwatch, machine
from slime_instrument._dump import dumper as dumper_module
from slime_instrument._dump.agree import Seen
from slime_instrument._dump.dumper import Dumper
from slime_instrument._settings import Settings

__all__ = ["Outcome", "measure"]


@dataclass(frozen=True)
class Turn:
    """One dump on one rank. ``seconds`` by phase; ``total`` among them."""

    seconds: dict[str, float]
    collectives: dict[str, int]
    """Calls of torch.distributed's communicating functions."""
    pieces: int
    """Pieces that were handed to sockets of our own."""
    connections: int
    bytes_sent: int
    memory_growth: int | None


@dataclass(frozen=True)
class Outcome:
    case: Case
    baseline: str
    groups: str
    file_bytes: int
    turns: dict[str, list[list[Turn]]]
    """``turns[way][repetition][rank]``; ways are "ours" and "slime"."""
    identical: bool

    def blocked(self, way: str, phase: str = "total") -> list[float]:
        """Seconds per repetition on the slowest rank."""
        return [max(turn.seconds.get(phase, 0.0) for turn in turns) for turns in self.turns[way]]

    def ratio(self, phase: str = "total") -> Figure:
        pairs = zip(self.blocked("ours", phase), self.blocked("slime", phase), strict=True)
        return Figure.of([ours / slime for ours, slime in pairs])

    def growth_over_file(self, way: str) -> float | None:
        """The writer's largest rise of resident memory over the size of the file."""
        rises = [turns[0].memory_growth for turns in self.turns[way]]
        known = [rise for rise in rises if rise is not None]
        return max(known) / self.file_bytes if known else None

    def collectives(self, way: str) -> list[int]:
        """Per rank, of the last repetition."""
        return [sum(turn.collectives.values()) for turn in self.turns[way][-1]]

    def as_dict(self) -> dict[str, Any]:
        """``ratio_*`` and ``rss_growth_over_file`` are what the targets speak of; ratios are medians."""
        phases = {
            way: sorted({p for turns in repeated for t in turns for p in t.seconds})
            for way, repeated in self.turns.items()
        }
        return {
            "case": asdict(self.case),
            "baseline": self.baseline,
            "groups": self.groups,
            "machine": machine(),
            "async_write": Settings.from_environment().async_write,
            "ratio_total": self.ratio().median,
            "ratio_restore": self.ratio("restore").median,
            "ratio_total_spread": self.ratio().as_dict(),
            "ratio_restore_spread": self.ratio("restore").as_dict(),
            "seconds": {way: {p: Figure.of(self.blocked(way, p)).as_dict() for p in phases[way]} for way in self.turns},
            "file_bytes": self.file_bytes,
            "rss_growth_over_file": self.growth_over_file("ours"),
            "rss_growth_over_file_baseline": self.growth_over_file("slime"),
            "collectives": max(self.collectives("ours")),
            "collectives_baseline": max(self.collectives("slime")),
            "collectives_by_rank": self.collectives("ours"),
            "pieces_by_rank": [turn.pieces for turn in self.turns["ours"][-1]],
            "connections_by_rank": [turn.connections for turn in self.turns["ours"][-1]],
            "bytes_sent_by_rank": [turn.bytes_sent for turn in self.turns["ours"][-1]],
            "bit_identical": self.identical,
        }


def measure(case: Case, repeats: int = 7, *, own_rendering: bool = False) -> Outcome:
    """Run both ways ``repeats`` times on ``case.world`` forked ranks. RuntimeError when a rank fails.

    ``own_rendering``: neither slime's own code nor megatron-core, also where they are at hand.
    """
    groups = megatron_groups.load(stand_in=own_rendering)
    slime = baseline.load(own_rendering=own_rendering)
    gc.collect()
    gc.freeze()  # what was imported here need not be looked through again on every rank
    with tempfile.TemporaryDirectory(prefix="dump_cost_") as folder:
        answers = run_on_ranks(case.world, case.cp, lambda rank: _on_rank(case, rank, repeats, slime, Path(folder)))
        turns = {
            way: [[answer[way][repetition] for answer in answers] for repetition in range(repeats)]
            for way in ("ours", "slime")
        }
        files = {way: Path(folder) / f"{way}.pt" for way in turns}
        return Outcome(
            case, slime.name, groups, files["ours"].stat().st_size, turns, _same(files["ours"], files["slime"])
        )


def _on_rank(case: Case, rank: int, repeats: int, slime: baseline.Baseline, folder: Path) -> dict[str, list[Turn]]:
    runtime = Dumper(Settings.from_environment(), _raise)
    runtime.begin(0)
    dist.barrier()
    # One small dump each way first: connections are made and modules loaded once in a job, not once in a dump.
    small = rollout_data(replace(case, samples=1, response=8), rank)
    _ours(runtime, small, str(folder / "first.pt"))
    slime.dump(small, str(folder / "first.pt"))
    data = rollout_data(case, rank)
    ways = {
        "ours": lambda: _ours(runtime, data, str(folder / "ours.pt")),
        "slime": lambda: slime.dump(data, str(folder / "slime.pt")),
    }
    turns: dict[str, list[Turn]] = {way: [] for way in ways}
    for repetition in range(repeats):
        for way in reversed(ways) if repetition % 2 else list(ways):
            gc.collect()
            dist.barrier()
            with PeakMemory() as memory, Collectives() as collectives, Connections() as own:
                watch = ways[way]()
            turns[way].append(
                Turn(
                    {**watch.phases, "total": watch.total},
                    collectives.counts,
                    own.pieces,
                    own.connections,
                    collectives.bytes_sent + own.bytes_sent,
                    memory.growth,
                )
            )
    return turns


def _raise(where: str, error: BaseException, lost: str, *, may_raise: bool = True) -> None:
    raise error


def _ours(runtime: Dumper, data: dict[str, Any], path: str) -> Stopwatch:
    """``restore`` is everything up to whole fields on the writer; for the other ranks, everything."""
    watch = Stopwatch()
    runtime.begin(0)
    args = SimpleNamespace(save_debug_train_data=path, qkv_format="thd")
    with (
        watch.around(dumper_module, "build_payload", "payload"),
        watch.around(dumper_module, "write_dump", "write"),
        watch.whole(),
    ):
        runtime.dump(args, 0, data, Seen())
    blocking = ("payload",) if runtime._settings.async_write else ("payload", "write")
    watch.phases["restore"] = watch.total - sum(watch.phases.get(phase, 0.0) for phase in blocking)
    runtime._background.flush()  # what was left to the background belongs to nobody's blocked time
    return watch


def _same(one: Path, other: Path) -> bool:
    """Bit for bit, samples and whole-batch fields; ``dp_shards`` differ by the provenance that is ours alone."""
    first, second = (torch.load(path, weights_only=True) for path in (one, other))
    keys = {*first, *second} - {"dp_shards"}
    return all(_equal(first.get(key), second.get(key)) for key in keys)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.contiguous().numpy().tobytes() == other.contiguous().numpy().tobytes()
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _table(outcome: Outcome) -> str:
    lines = [
        f"{outcome.case}: a file of {outcome.file_bytes / 1e6:.1f} MB; "
        f"{len(outcome.turns['ours'])} repetitions, {machine()}",
        f"baseline: {outcome.baseline}; groups: {outcome.groups}; samples bit-identical: {outcome.identical}",
        "",
        f"{'':24}{'ours':>24}{'slime':>24}{'ours / slime':>24}",
    ]
    for phase in ("total", "restore"):
        ours, slime = (Figure.of(outcome.blocked(way, phase)) for way in ("ours", "slime"))
        lines.append(f"{phase + ', s':24}{ours!s:>24}{slime!s:>24}{outcome.ratio(phase)!s:>24}")
    for phase in ("payload", "write", "gather"):
        shown = [
            f"{Figure.of(outcome.blocked(w, phase))}" if any(outcome.blocked(w, phase)) else ""
            for w in ("ours", "slime")
        ]
        lines.append(f"{phase + ', s':24}{shown[0]:>24}{shown[1]:>24}")
    growths = [outcome.growth_over_file(way) for way in ("ours", "slime")]
    shown = ["unknown" if growth is None else f"{growth:.2f}" for growth in growths]
    lines.append(f"{'memory growth / file':24}{shown[0]:>24}{shown[1]:>24}")
    counts = [str(max(outcome.collectives(way))) for way in ("ours", "slime")]
    lines.append(f"{'collectives per rank':24}{counts[0]:>24}{counts[1]:>24}")
    last = outcome.turns["ours"][-1]
    lines.append(f"{'pieces sent per rank':24}{max(turn.pieces for turn in last):>24}")
    lines.append(f"{'connections per rank':24}{max(turn.connections for turn in last):>24}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dump_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--cp", type=int, default=2, help="context-parallel ranks")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--samples", type=int, default=128, help="samples per data-parallel rank")
    parser.add_argument("--response", type=int, default=2048, help="response tokens per sample")
    parser.add_argument("--fields", type=int, default=8, help="response-level fields")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--own-rendering", action="store_true", help="neither slime's own code nor megatron-core")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    case = Case(given.cp, given.dp, given.samples, given.response, given.fields)
    outcome = measure(case, given.repeats, own_rendering=given.own_rendering)
    print(json.dumps(outcome.as_dict(), indent=2) if given.json else _table(outcome))
    if not outcome.identical:
        print("the two ways wrote different samples", file=sys.stderr)
    return 0 if outcome.identical else 1


if __name__ == "__main__":
    sys.exit(main())
