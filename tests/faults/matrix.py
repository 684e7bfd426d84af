"""The fault matrix: ``python -m tests.faults.matrix [--slime DIR] [--layout 1,1,2,2] [--site PATTERN]``.

Plays every scenario of ``scenarios.everything`` and prints one table; exit status 1 when any has a problem.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.faults.scenarios import Layout, Scenario, everything, reference
from tests.faults.verdict import KINDS, Problem, judge

__all__ = ["LAYOUTS", "Result", "play", "table"]

LAYOUTS = (Layout(1, 1, 2, 2), Layout(2, 2, 2, 1))
_ROOT = Path(__file__).resolve().parents[2]


class Result(NamedTuple):
    scenario: Scenario
    problems: list[Problem]
    answer: dict[str, Any]
    """What the ranks reported, as the verdict saw it."""


def play(
    scenarios: Iterable[Scenario],
    layout: Layout,
    slime: Path | None = None,
    progress: Callable[[str], None] = lambda _text: None,
    keep: Callable[[Result], None] = lambda _result: None,
) -> list[Result]:
    """Play ``scenarios`` and judge each against a run without a fault. RuntimeError if the stage itself breaks."""
    from slime_instrument.lab._training import _QUIET

    listed = [reference(), *scenarios]
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as out, open(Path(out) / "stage.log", "wb") as log:
        spec = {
            "out": out,
            "slime": str(slime) if slime else None,
            "layout": vars(layout),
            "scenarios": [(number, scenario.as_dict()) for number, scenario in enumerate(listed)],
        }
        environment = {**os.environ, **_QUIET, "SLIME_INSTRUMENT": "1", "PYTHONPATH": str(_ROOT)}
        reader, writer = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.stage", str(writer)],
            stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT,
            env=environment, pass_fds=(writer,), start_new_session=True, cwd=_ROOT,
        )  # fmt: skip
        os.close(writer)
        try:
            assert process.stdin is not None
            with process.stdin:
                process.stdin.write(json.dumps(spec).encode())
            expected: dict[str, Any] | None = None
            with os.fdopen(reader) as answers:
                for line in answers:
                    answer = json.loads(line)
                    scenario = listed[answer["number"]]
                    if answer["outcome"] != "finished":
                        answer["stacks"]["log"] = (Path(out) / "stage.log").read_text(errors="replace")[-4000:]
                    if expected is None:
                        expected = _reference_of(answer, layout)
                        problems = judge(scenario, layout, answer, expected)
                    else:
                        problems = judge(scenario, layout, answer, expected)
                        results.append(Result(scenario, problems, answer))
                        keep(results[-1])
                    if problems:
                        progress(f"{layout} {scenario.name}")
                        for kind, text in problems:
                            progress(f"    {kind}: {text}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if len(results) != len(listed) - 1:
            text = (Path(out) / "stage.log").read_text(errors="replace")[-4000:]
            raise RuntimeError(f"the stage ended after {len(results)} of {len(listed) - 1} scenarios\n{text}")
    return results


def _reference_of(answer: dict[str, Any], layout: Layout) -> dict[str, Any]:
    if answer["outcome"] != "finished":
        raise RuntimeError(f"the run without a fault {answer['outcome']}: {answer.get('stacks')}")
    files = answer["reports"]["0"]["rollouts"][-1]["files"]
    if len(set(files.values())) != len(files):
        raise RuntimeError("the run without a fault left equal files: no dump was written")
    return answer


def _captures_itself(slime: Path | None) -> bool:
    loss = slime / "slime/backends/megatron_utils/loss.py" if slime else None
    return loss is not None and "def enable_log_prob_capture" in loss.read_text()


def table(rows: Iterable[tuple[str, list[Result], float]]) -> str:
    """A Markdown table: one row per target and layout."""
    lines = [
        "| target, layout | faults tried | " + " | ".join(KINDS) + " | seconds |",
        "|---" * (len(KINDS) + 3) + "|",
    ]
    for name, results, seconds in rows:
        counts = Counter(kind for result in results for kind in {kind for kind, _ in result.problems})
        cells = [str(counts[kind]) for kind in KINDS]
        tried = sum(len(result.scenario.faulty) for result in results)
        lines.append(f"| {name} | {tried} | " + " | ".join(cells) + f" | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slime", type=Path, help="a slime checkout; without it the miniature")
    parser.add_argument("--layout", help="tp,pp,cp,dp; without it both")
    parser.add_argument("--site", default="*", help="a pattern of site names, such as 'dump/*'")
    parser.add_argument("--part", default="1/1", help="play the i-th of n equal parts, such as 2/4")
    parser.add_argument("--mode", choices=("lenient", "strict", "both"), default="both")
    parser.add_argument("--record", type=Path, help="append the outcome to this JSON-lines file")
    parser.add_argument("--table", type=Path, help="play nothing: print the table of such a file")
    chosen = parser.parse_args()
    if chosen.table:
        print(recorded(chosen.table))
        return 0
    layouts = [Layout(*map(int, chosen.layout.split(",")))] if chosen.layout else list(LAYOUTS)
    part, of = map(int, chosen.part.split("/"))
    target = chosen.slime.name if chosen.slime else "miniature"
    rows = []
    for layout in layouts:
        scenarios = [
            scenario
            for scenario in everything(layout, native_capture=_captures_itself(chosen.slime))
            if fnmatch.fnmatch(scenario.site, chosen.site)
            and (chosen.mode == "both" or scenario.strict == (chosen.mode == "strict"))
        ][part - 1 :: of]
        row = f"{target}, {layout}"
        with open(chosen.record or os.devnull, "a", buffering=1) as record:
            began = time.monotonic()

            def keep(result: Result, row: str = row, record: IO[str] = record) -> None:
                entry = {"row": row, "scenario": result.scenario.as_dict(), "problems": result.problems}
                record.write(json.dumps(entry) + "\n")

            results = play(scenarios, layout, chosen.slime, lambda text: print(text, file=sys.stderr, flush=True), keep)
            rows.append((row, results, time.monotonic() - began))
            record.write(json.dumps({"row": row, "seconds": rows[-1][2]}) + "\n")
    print(table(rows))
    return int(any(result.problems for _, results, _ in rows for result in results))


def recorded(path: Path) -> str:
    rows: dict[str, list[Result]] = {}
    seconds: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        # One that broke off left no time.
        if "seconds" in entry:
            seconds[entry["row"]] += entry["seconds"]
        else:
            problems = [(kind, text) for kind, text in entry["problems"]]
            rows.setdefault(entry["row"], []).append(Result(Scenario.of(entry["scenario"]), problems, {}))
    return table((name, results, seconds[name]) for name, results in rows.items())


if __name__ == "__main__":
    sys.exit(main())
