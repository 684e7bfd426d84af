"""What the matrix asks of real slime, asked of the miniature: every layout and sample kind, without a checkout."""

from __future__ import annotations

import pytest

from tools.matrix.checks import Verdict, judge
from tools.matrix.layouts import LAYOUTS, RECIPE_LAYOUTS
from tools.matrix.plan import MINIATURE, Cell
from tools.matrix.runs import Runs

pytestmark = pytest.mark.lab

#: What real slime cannot train in one process either, and what the miniature does not have.
MISSING = (
    Cell(MINIATURE, "single", "grpo", "edge:no-prompt"),
    Cell(MINIATURE, "allgather-CP2", "grpo", "default"),
    Cell(MINIATURE, "DP2-CP2", "gspo", "default"),
)
CELLS = [Cell(MINIATURE, layout.name, "grpo", "default") for layout in LAYOUTS.values() if layout.listed]
CELLS += [
    Cell(MINIATURE, layout, "grpo", samples)
    for samples in ("edge", "edge:no-prompt", "uneven")
    for layout in ("single", *RECIPE_LAYOUTS)
]
CELLS = [cell for cell in CELLS if cell not in MISSING]
CELLS += [
    Cell(MINIATURE, RECIPE_LAYOUTS[0], recipe, "default")
    for recipe in (
        "steps",
        "rollout-logprobs-steps",
        "recompute-loss",
        "dynamic",
        "ref-kl",
        "distributed-optimizer",
        "bf16",
    )
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Verdict]:
    runs = Runs(tmp_path_factory.mktemp("runs"), {}, None)
    cells = (*CELLS, *MISSING)
    runs.make(run for cell in cells for run in cell.runs)
    return {cell: judge(cell, runs) for cell in cells}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.key.replace(" / ", "-"))
def test_everything_asked_of_a_cell_holds(verdicts: dict[Cell, Verdict], cell: Cell) -> None:
    verdict = verdicts[cell]
    assert {name: found for name, found in verdict.checks.items() if found != "ok"} == {}
    assert (verdict.status, verdict.reason) == ("ok", None)


def test_every_layout_is_held_against_the_single_process(verdicts: dict[Cell, Verdict]) -> None:
    for cell in CELLS:
        if LAYOUTS[cell.layout].reference != cell.layout and cell.samples == "default":
            assert verdicts[cell].checks["as the single process"] == "ok", cell
            # Data- and pipeline-parallel ranks do the very same arithmetic; in bf16 there may be nothing left to see.
            cut = LAYOUTS[cell.layout].cp * LAYOUTS[cell.layout].tp > 1
            assert cell.recipe == "bf16" or (verdicts[cell].figures["log_probs"] > 0) == cut, cell


@pytest.mark.parametrize("cell", MISSING, ids=lambda cell: cell.key.replace(" / ", "-"))
def test_what_the_miniature_lacks_is_told_apart_from_what_fails(verdicts: dict[Cell, Verdict], cell: Cell) -> None:
    assert verdicts[cell].status == "absent"
    assert "the miniature has no such part: " in (verdicts[cell].reason or "")
