"""What the matrix asks of real slime, asked of the miniature: every layout and sample kind, without a checkout."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from _pytest.mark.structures import ParameterSet

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
CELLS = [cell for cell in CELLS if cell not in MISSING]
#: One of each kind; ``make test-full`` has all.
QUICK = {
    *(Cell(MINIATURE, layout, "grpo", "default") for layout in ("single", "DP2-CP2", "TP2-PP2-CP2", "VPP2-PP4")),
    *(Cell(MINIATURE, layout, "grpo", "edge") for layout in RECIPE_LAYOUTS),
    Cell(MINIATURE, "DP2-CP2", "grpo", "edge:no-prompt"),
    Cell(MINIATURE, "DP2-CP2", "grpo", "uneven"),
    *(Cell(MINIATURE, "DP2-CP2", recipe, "default") for recipe in ("rollout-logprobs-steps", "ref-kl", "bf16")),
    *MISSING[:2],
}


def named(cells: Iterable[Cell]) -> list[ParameterSet]:
    return [
        pytest.param(cell, id=cell.key.replace(" / ", "-"), marks=[] if cell in QUICK else pytest.mark.full)
        for cell in cells
    ]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Verdict]:
    """Of all cells that this session has tests of: their runs share processes."""
    mine = (item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path)
    cells = [item.callspec.params["cell"] for item in mine if hasattr(item, "callspec")]
    runs = Runs(tmp_path_factory.mktemp("runs"), {}, None)
    runs.make(run for cell in cells for run in cell.runs)
    return {cell: judge(cell, runs) for cell in cells}


@pytest.mark.parametrize("cell", named(CELLS))
def test_everything_asked_of_a_cell_holds(verdicts: dict[Cell, Verdict], cell: Cell) -> None:
    verdict = verdicts[cell]
    assert {name: found for name, found in verdict.checks.items() if found != "ok"} == {}
    assert (verdict.status, verdict.reason) == ("ok", None)


def test_every_layout_is_held_against_the_single_process(verdicts: dict[Cell, Verdict]) -> None:
    held = 0
    for cell, verdict in verdicts.items():
        layout = LAYOUTS[cell.layout]
        if layout.reference != cell.layout and cell.samples == "default" and verdict.status == "ok":
            assert verdict.checks["as the single process"] == "ok", cell
            # Data- and pipeline-parallel ranks do the very same arithmetic; in bf16 there may be nothing left to see.
            assert cell.recipe == "bf16" or (verdict.figures["log_probs"] > 0) == (layout.cp * layout.tp > 1), cell
            held += 1
    assert held >= 3


@pytest.mark.parametrize("cell", named(MISSING))
def test_what_the_miniature_lacks_is_told_apart_from_what_fails(verdicts: dict[Cell, Verdict], cell: Cell) -> None:
    assert verdicts[cell].status == "absent"
    assert "the miniature has no such part: " in (verdicts[cell].reason or "")
