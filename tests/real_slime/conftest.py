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
LAYOUTS = ("single", "CP2", "DP2-CP2", "TP2-PP2-CP2", "DP2-CP2-TP2")


@pytest.fixture(scope="session")
def sources() -> dict[str, Path]:
    return checkouts()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, sources: dict[str, Path]) -> Runs:
    """Every run that these tests look at, made at once: slime is imported once for each release and way of arming."""
    core = os.environ.get("SLIME_OLD_CORE")
    made = Runs(tmp_path_factory.mktemp("runs"), sources, Path(core) if core else None)
    wanted = [Cell(LAST_WITHOUT, layout, "grpo", "default") for layout in LAYOUTS]
    wanted += [Cell(FIRST_NATIVE, layout, "grpo", "default") for layout in ("single", "DP2-CP2")]
    wanted += [*ODD, Cell(LAST_WITHOUT, "single", "grpo", "edge:no-prompt")]
    made.make(run for cell in wanted for run in cell.runs if run.release in sources)
    return made


@pytest.fixture(scope="session")
def verdicts(runs: Runs) -> dict[str, Verdict]:
    """By layout, at the last release without a native dump."""
    return {layout: judge(Cell(LAST_WITHOUT, layout, "grpo", "default"), runs) for layout in LAYOUTS}
