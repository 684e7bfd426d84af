"""slime's own CPU tests, where a checkout is there, pass or fail as they did, with the layer armed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from slime_instrument.lab import find_sources

pytestmark = pytest.mark.real_slime

# Those about modules with targets in them, as far as they need neither GPU nor network; about ten seconds.
FILES = (
    "test_process_rollout_data.py",
    "test_cp_utils.py",
    "test_dp_schedule.py",
    "test_metric_report.py",
    "test_cispo_loss.py",
    "test_logprob_response_spans.py",
)
CHECKOUT = "681b3adca~1"
STUBS = Path(__file__).resolve().parents[2] / "slime_instrument" / "lab" / "stubs"


def test_slimes_own_tests_have_the_same_outcomes_armed_and_off(installed: Any, tmp_path: Path) -> None:
    source = next((source for source in find_sources() if source.name == CHECKOUT), None)
    if source is None:
        pytest.skip(f"no slime checkout {CHECKOUT} in $SLIME_SOURCES or ~/.cache/slime-instrument/sources")
    shutil.copytree(source / "tests", tmp_path / "tests")
    outcomes = {
        switch: installed.run(
            "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rA", *(tmp_path / "tests" / name for name in FILES),
            path=[source, STUBS], check=False, SLIME_INSTRUMENT=switch, TORCHDYNAMO_DISABLE="1",
            WANDB_MODE="disabled",
        ).stdout
        for switch in ("0", "1")
    }  # fmt: skip
    off, armed = (summary(text) for text in outcomes.values())
    assert armed == off, outcomes["1"]
    assert sum(outcome == "PASSED" for outcome in off.values()) > 30, outcomes["0"]


def summary(output: str) -> dict[str, str]:
    """Outcome by test, from the short summary."""
    kinds = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
    lines = [line.split(" ", 2) for line in output.splitlines() if line.startswith(kinds)]
    return {parts[1]: parts[0] for parts in lines}
