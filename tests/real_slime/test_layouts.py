"""The last slime without a v2 dump, against one process, itself, and the first with a v2 dump, on several layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime_instrument.lab import LabOptions, LabResult, train
from tools.matrix.checks import Verdict, judge
from tools.matrix.compare import from_native, from_single
from tools.matrix.plan import FIRST_NATIVE, LAST_WITHOUT, Cell
from tools.matrix.runs import Runs

from .conftest import EACH_LAYOUT, ODD

pytestmark = pytest.mark.real_slime

DP2_CP2 = Cell(LAST_WITHOUT, "DP2-CP2", "grpo", "default")


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_everything_asked_of_a_cell_of_the_matrix_holds(verdicts: dict[str, Verdict], layout: str) -> None:
    assert {name: found for name, found in verdicts[layout].checks.items() if found != "ok"} == {}
    assert verdicts[layout].status == "ok"


@pytest.mark.parametrize("cell", ODD, ids=lambda cell: f"{cell.recipe}-{cell.samples}")
def test_everything_asked_of_odd_samples_holds(made: Runs, cell: Cell) -> None:
    verdict = judge(cell, made)
    assert {name: found for name, found in verdict.checks.items() if found != "ok"} == {}
    assert verdict.status == "ok"


@pytest.mark.parametrize("layout", EACH_LAYOUT[1:])
def test_log_probs_are_those_of_the_single_process(verdicts: dict[str, Verdict], layout: str) -> None:
    assert verdicts[layout].checks["as the single process"] == "ok"
    assert 0 < verdicts[layout].figures["log_probs"] < 1e-5


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_the_file_is_native_slimes_bit_for_bit(
    verdicts: dict[str, Verdict], sources: dict[str, Path], layout: str
) -> None:
    if FIRST_NATIVE not in sources:
        pytest.skip(f"no slime checkout named {FIRST_NATIVE}")
    assert verdicts[layout].checks["as native slime"] == "ok"


@pytest.mark.parametrize("layout", EACH_LAYOUT)
def test_weights_after_the_step_are_those_of_the_run_without_us(verdicts: dict[str, Verdict], layout: str) -> None:
    assert verdicts[layout].checks["weights untouched"] == "ok"


def test_positions_are_never_among_the_logged_metrics(made: Runs, sources: dict[str, Path]) -> None:
    looked_at = [DP2_CP2.subject, *([Cell(FIRST_NATIVE, *_rest(DP2_CP2)).subject] if FIRST_NATIVE in sources else [])]
    for run in looked_at:
        outcome = made.get(run)
        assert outcome is not None
        logged = {key for metrics in outcome.metrics for key in metrics}
        assert {"rollout/advantages", "train/loss"} <= logged
        assert not {key for key in logged if "partition" in key or "slime_instrument" in key}


def test_native_slime_writes_the_same_file_with_us_and_loses_its_stray_metric(
    made: Runs, sources: dict[str, Path]
) -> None:
    if FIRST_NATIVE not in sources:
        pytest.skip(f"no slime checkout named {FIRST_NATIVE}")
    cell = Cell(FIRST_NATIVE, *_rest(DP2_CP2))
    assert judge(cell, made).checks["as slime's own file"] == "ok"
    plain = made.get(cell.plain)
    assert plain is not None
    assert any("rollout/partition" in metrics for metrics in plain.metrics), "what disappears is there without us"


def test_swapped_zigzag_chunks_are_noticed_by_every_comparison(
    made: Runs, sources: dict[str, Path], tmp_path: Path
) -> None:
    """The comparisons above can fail: here the back chunk is taken for the front one."""
    plugin = tmp_path / "broken.py"
    plugin.write_text(
        "from slime_instrument._dump import zigzag\n"
        "right = zigzag.owned\n"
        "zigzag.owned = lambda *args: right(*args)[::-1]\n"
    )
    broken = _train(tmp_path, sources, plugin=plugin)
    payload = _load(broken.train_dumps[0])
    found, largest = from_single(payload, _of(made, DP2_CP2.single), tolerance=1e-5, exact=True, cp=2)
    assert found
    assert largest > 0.1
    if DP2_CP2.native is not None and FIRST_NATIVE in sources:
        assert any("log_probs" in text for text in from_native(payload, _of(made, DP2_CP2.native), 2))


def test_a_missing_target_is_noticed_and_leaves_no_half_captured_values(
    made: Runs, sources: dict[str, Path], tmp_path: Path
) -> None:
    plugin = tmp_path / "broken.py"
    plugin.write_text(
        "from slime_instrument import _hooks\n"
        "_hooks.HOOKS = tuple(hook for hook in _hooks.HOOKS if hook.name != 'micro-batches')\n"
    )
    payload = _load(_train(tmp_path, sources, plugin=plugin).train_dumps[0])
    assert not any("log_probs" in sample for sample in payload["samples"])
    found, _ = from_single(payload, _of(made, DP2_CP2.single), tolerance=1e-5, exact=True, cp=2)
    assert any("log_probs: only in the single process" in text for text in found)


def _train(tmp_path: Path, sources: dict[str, Path], plugin: Path) -> LabResult:
    return train(LabOptions(out=tmp_path / "out", slime=sources[LAST_WITHOUT], dp=2, cp=2, plugin=plugin))


def _of(made: Runs, run: object) -> dict[str, object]:
    outcome = made.get(run)  # type: ignore[arg-type]
    assert outcome is not None
    return _load(outcome.train_dumps[0])


def _load(path: Path) -> dict[str, object]:
    payload: dict[str, object] = torch.load(path, weights_only=True)
    return payload


def _rest(cell: Cell) -> tuple[str, str, str]:
    return cell.layout, cell.recipe, cell.samples
