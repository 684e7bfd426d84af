"""Paths that cannot work are refused when training starts, by real slime with us in it: row 3 of the reported cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_instrument.lab import LabError, LabOptions, LabResult, train_all
from tools.matrix.plan import LAST_WITHOUT

pytestmark = pytest.mark.real_slime

REFUSED = {
    "t.pt": "expected a different file for each rollout, found a path without {rollout_id}",
    "{rollout_id}_{step}.pt": "expected only {rollout_id} and {rank} as placeholders, found {step}",
    "../rollout_data/{rollout_id}.pt": "expected another path than --save-debug-rollout-data, found the same path",
}


@pytest.fixture(scope="module")
def outcomes(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, LabResult | LabError]:
    folder = tmp_path_factory.mktemp("refusals")
    runs = [
        LabOptions(out=folder / str(number), slime=sources[LAST_WITHOUT], rollouts=2, dump_name=name)
        for number, name in enumerate(REFUSED)
    ]
    return dict(zip(REFUSED, train_all(runs), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_a_path_that_cannot_work_is_refused_before_the_first_rollout(
    outcomes: dict[str, LabResult | LabError], name: str
) -> None:
    outcome = outcomes[name]
    assert isinstance(outcome, LabError)
    (words,) = {text.strip().splitlines()[-1] for text in outcome.tracebacks.values()}
    assert "TrainingPathError: slime_instrument: --save-debug-train-data" in words
    assert REFUSED[name] in words
    assert "Training is not started, because its dumps would be lost. Use a path such as" in words
    assert "in train_actor" not in str(outcome)
