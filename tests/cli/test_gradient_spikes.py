"""A spike of the gradient norm in what compare and report say of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._report.build import write_report
from tests.analysis.test_audit import Run
from tests.analysis.test_spikes import NORMS, large

from .outcomes import strict


@pytest.fixture
def run_on_disk(tmp_path: Path) -> Path:
    """Six rollouts as slime and we write them, with the steps in the provenance; in the fourth, sample 11 is large."""
    for rollout_id, norm in enumerate(NORMS):
        run = Run()
        if rollout_id == 3:
            large(run, 11)
        pair = run.pair()
        shard: dict[str, Any] = dict(pair.train.dp_shards[0])
        shard["provenance"] = {**shard["provenance"], "steps": [{"step": 0, "grad_norm": norm, "losses": {}}]}
        train = {"format_version": 2, "rollout_id": rollout_id, "rank": 0, "samples": run.train, "dp_shards": [shard]}
        for side, payload in (
            ("rollout_data", {"rollout_id": rollout_id, "samples": run.rollout}),
            ("train_data", train),
        ):
            (tmp_path / side).mkdir(exist_ok=True)
            torch.save(payload, tmp_path / side / f"{rollout_id}.pt")
    return tmp_path


def test_compare_and_report_tell_it_and_the_verdict_is_as_without(call: Any, run_on_disk: Path) -> None:
    outcome = call("compare", run_on_disk, "--json")
    document = strict(outcome.out)
    (spike,) = document["gradient_spikes"]
    assert (spike["code"], spike["samples"]) == ("gradient-spike", [11])
    assert all("gradient-spike" not in codes for codes in document["trend"]["findings"])
    assert "gradient-spike rollout 3, optimizer step 0: grad_norm is 12" in call("compare", run_on_disk).out
    answers = write_report([run_on_disk], run_on_disk / "report.html").verdict.answers
    (row,) = [one for one in answers if one[0] == "Gradient norm"]
    assert "Position 11 carries" in row[1]
    assert row[2] == "#r=3&s=11"
