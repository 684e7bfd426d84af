"""Real slime, trained for these tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools.matrix.checks import Verdict, judge
from tools.matrix.plan import FIRST_NATIVE, LAST_WITHOUT, Cell, checkouts
from tools.matrix.runs import Runs

#: What the plainest recipe on plain samples does not show: PPO leaves a -0.0 in kl; every odd sample; no prompt at all.
ODD = tuple(
    Cell(LAST_WITHOUT, "DP2-CP2", recipe, samples)
    for recipe, samples in (("ppo", "long"), ("grpo", "edge"), ("grpo", "edge:no-prompt"), ("grpo", "uneven"))
)
#: ``make test-full`` has the last two as well.
LAYOUTS = ("single", "DP2-CP2", "TP2-PP2-CP2", "CP2", "DP2-CP2-TP2")
EACH_LAYOUT = [*LAYOUTS[:3], *(pytest.param(layout, marks=pytest.mark.full) for layout in LAYOUTS[3:])]


@pytest.fixture(scope="session")
def sources() -> dict[str, Path]:
    return checkouts()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, sources: dict[str, Path]) -> Runs:
    """Runs of the matrix, of which none is made yet."""
    core = os.environ.get("SLIME_OLD_CORE")
    return Runs(tmp_path_factory.mktemp("runs"), sources, Path(core) if core else None)


@pytest.fixture(scope="session")
def layouts(request: pytest.FixtureRequest) -> list[str]:
    """Those that the chosen tests ask for."""
    calls = [item.callspec for item in request.session.items if hasattr(item, "callspec")]
    return [layout for layout in LAYOUTS if any(call.params.get("layout") == layout for call in calls)]


@pytest.fixture(scope="session")
def made(runs: Runs, sources: dict[str, Path], layouts: list[str]) -> Runs:
    """Those that several tests look at, made at once: slime is imported once for each release and way of arming."""
    wanted = [Cell(LAST_WITHOUT, layout, "grpo", "default") for layout in {*layouts, "single", "DP2-CP2"}]
    wanted += [Cell(FIRST_NATIVE, layout, "grpo", "default") for layout in ("single", "DP2-CP2")]
    wanted += [*ODD, Cell(LAST_WITHOUT, "single", "grpo", "edge:no-prompt")]
    runs.make(run for cell in wanted for run in cell.runs if run.release in sources)
    return runs


@pytest.fixture(scope="session")
def verdicts(made: Runs, layouts: list[str]) -> dict[str, Verdict]:
    """By layout, at the last release without a native dump."""
    return {layout: judge(Cell(LAST_WITHOUT, layout, "grpo", "default"), made) for layout in layouts}
