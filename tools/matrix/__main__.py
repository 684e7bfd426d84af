"""``python -m tools.matrix``: run what has not been run, judge it, write the page."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slime_instrument.lab._samples import EDGE_KINDS
from tools.matrix import page, plan
from tools.matrix.checks import Verdict, judge
from tools.matrix.layouts import LAYOUTS
from tools.matrix.plan import Cell, absent, cells, checkouts
from tools.matrix.recipes import RECIPES
from tools.matrix.results import Results
from tools.matrix.runs import Runs

_PAGE = Path("docs/compatibility.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1: some cell of those asked for failed."""
    given = _parser().parse_args(arguments)
    sources = checkouts()
    wanted = _wanted(given, [*(release for release in plan.RELEASES if release in sources), plan.MINIATURE])
    results = Results(given.out / "results.json")
    runs = Runs(given.out / "runs", sources, given.core, say=lambda text: print(text, flush=True))
    failed = 0
    if not given.page_only:
        for start in range(0, len(wanted), given.slice):
            failed += _run(wanted[start : start + given.slice], runs, results, given)
    if given.page is not None:
        given.page.write_text(page.render(results.read(), sources, runs.code))
        print(f"wrote {given.page}")
    return 1 if failed else 0


def _run(some: Sequence[Cell], runs: Runs, results: Results, given: argparse.Namespace) -> int:
    began = time.monotonic()
    known = results.read()
    verdicts: dict[Cell, Verdict] = {}
    todo = []
    for cell in some:
        reason = absent(cell, runs.sources.get(cell.release))
        if reason is not None:
            verdicts[cell] = Verdict("absent", reason=reason)
        elif given.again or given.changed or known.get(cell.key, {}).get("status") != "ok":
            todo.append(cell)
    needed = [run for cell in todo for run in cell.runs if _can_make(run.release, runs)]
    if given.again or given.changed:
        runs.forget(needed, only_changed=not given.again)
    runs.make(needed)
    for cell in todo:
        verdicts[cell] = judge(cell, runs)
    # A set that slime cannot train is taken apart: which of its kinds is it?
    apart = [
        Cell(cell.release, cell.layout, cell.recipe, f"edge:{kind}")
        for cell, verdict in verdicts.items()
        if cell.samples == "edge" and verdict.status == "slime-cannot"
        for kind in EDGE_KINDS
    ]
    runs.make(run for cell in apart for run in cell.runs if _can_make(run.release, runs))
    for cell in apart:
        verdicts[cell] = judge(cell, runs)
    results.add(verdicts, runs.code)
    for cell, verdict in verdicts.items():
        print(f"{verdict.status:12}  {cell.key}" + (f"  {verdict.reason}" if verdict.reason else ""), flush=True)
    print(f"{len(verdicts)} of {len(some)} cells in {time.monotonic() - began:.0f} s", flush=True)
    return sum(verdict.status == "failed" for verdict in verdicts.values())


def _can_make(release: str, runs: Runs) -> bool:
    return release == plan.MINIATURE or release in runs.sources


def _wanted(given: argparse.Namespace, releases: list[str]) -> list[Cell]:
    def chosen(value: str, names: list[str] | None) -> bool:
        return names is None or value in names

    return [
        cell
        for cell in cells(releases)
        if chosen(cell.release, given.release)
        and chosen(cell.layout, given.layout)
        and chosen(cell.recipe, given.recipe)
        and chosen(cell.samples, given.samples)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/matrix"), help="where runs and results are kept")
    parser.add_argument("--core", type=Path, default=None, help="megatron-core 0.14.0, for v0.2.0 and v0.2.1")
    parser.add_argument(
        "--release", action="append", choices=[*plan.RELEASES, plan.MINIATURE], help="only this; repeatable"
    )
    parser.add_argument("--layout", action="append", choices=list(LAYOUTS))
    parser.add_argument("--recipe", action="append", choices=list(RECIPES))
    parser.add_argument("--samples", action="append", help="default, long, edge or uneven")
    parser.add_argument("--again", action="store_true", help="run everything asked for again")
    parser.add_argument("--changed", action="store_true", help="run again what was run with other code")
    parser.add_argument("--slice", type=int, default=24, help="cells between two writes of the results")
    parser.add_argument("--page", type=Path, nargs="?", const=_PAGE, default=None, help=f"write the page (to {_PAGE})")
    parser.add_argument("--page-only", action="store_true", help="run nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
