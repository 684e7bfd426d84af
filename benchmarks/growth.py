"""``python -m benchmarks.growth``: blocked time against samples and context-parallel size, as table and plot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.dump_cost import Outcome, measure
from benchmarks.plot import Series, panels
from benchmarks.shards import Case
from benchmarks.timing import Figure, machine

__all__ = ["series"]

_SAMPLES = (32, 64, 128, 256)
_CP = (1, 2, 4)


def series(response: int, repeats: int, *, own_rendering: bool = False) -> dict[str, list[Outcome]]:
    """Outcomes by what grows: one to eight times the samples at CP2, and CP 1, 2, 4 at 64 samples."""
    options = {"own_rendering": own_rendering}
    return {
        "samples": [measure(Case(2, 1, samples, response, 8), repeats, **options) for samples in _SAMPLES],
        "context parallel": [measure(Case(cp, 1, 64, response, 8), repeats, **options) for cp in _CP],
    }


def _row(outcome: Outcome) -> dict[str, Any]:
    seconds = {way: Figure.of(outcome.blocked(way)).as_dict() for way in ("ours", "slime")}
    return {
        "cp": outcome.case.cp,
        "samples": outcome.case.samples,
        "file_bytes": outcome.file_bytes,
        "seconds": seconds,
        "ratio_total": outcome.ratio().median,
        "collectives": max(outcome.collectives("ours")),
        "pieces": max(turn.pieces for turn in outcome.turns["ours"][-1]),
        "collectives_baseline": max(outcome.collectives("slime")),
    }


def _table(rows: dict[str, list[dict[str, Any]]]) -> str:
    lines = [
        machine(),
        f"{'':18}{'CP':>4}{'samples':>9}{'file, MB':>10}{'ours, s':>10}{'slime, s':>10}{'pieces':>10}{'of slime':>10}",
    ]
    for what, of_what in rows.items():
        for row in of_what:
            ours, slime = (row["seconds"][way]["median"] for way in ("ours", "slime"))
            lines.append(
                f"{what:18}{row['cp']:>4}{row['samples']:>9}{row['file_bytes'] / 1e6:>10.1f}{ours:>10.3f}{slime:>10.3f}"
                f"{row['pieces']:>10}{row['collectives_baseline']:>10}"
            )
    return "\n".join(lines)


def _plot(rows: dict[str, list[dict[str, Any]]]) -> str:
    drawn = []
    for what, of_what in rows.items():
        along = [float(row["samples" if what == "samples" else "cp"]) for row in of_what]
        lines = [Series(name, along, [row["seconds"][way]["median"] for row in of_what]) for way, name in
                 (("slime", "slime's way"), ("ours", "this package"))]  # fmt: skip
        drawn.append((what, lines))
    return panels(drawn, "seconds that training is blocked")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__.splitlines()[0])
    parser.add_argument("--response", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--own-rendering", action="store_true", help="neither slime's own code nor megatron-core")
    parser.add_argument("--plot", type=Path, help="write an SVG here")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    outcomes = series(given.response, given.repeats, own_rendering=given.own_rendering)
    rows = {what: [_row(outcome) for outcome in of_what] for what, of_what in outcomes.items()}
    if given.plot is not None:
        given.plot.write_text(_plot(rows), encoding="utf-8")
    print(json.dumps({"machine": machine(), **rows}, indent=2) if given.json else _table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
