"""``train_rollout_logprob_abs_diff`` is the number that slime logs for the same run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from slime_instrument._analysis.compare import compare
from slime_instrument.lab import LabOptions, train
from tools.matrix.plan import checkouts

pytestmark = pytest.mark.real_slime


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize("kinds", ["default", "edge:fan-out", "edge:removed,masked"])
@pytest.mark.parametrize("release", ["v0.2.4", "v0.3.0", "main"])
def test_the_metric_is_what_slime_logs(release: str, kinds: str, tmp_path: Path) -> None:
    slime = checkouts().get(release)
    if slime is None:
        pytest.skip(f"no slime checkout named {release}")
    if release == "v0.2.4" and kinds == "edge:fan-out":
        pytest.skip("this release has no fan-out")
    run = train(LabOptions(out=tmp_path, slime=slime, dp=2, samples=kinds))
    logged = [
        value
        for step in run.logged_metrics
        for name, value in step.items()
        if name.endswith("train_rollout_logprob_abs_diff")
    ]
    found = compare(run.rollout_dumps[0], run.train_dumps[0])
    assert found.metrics.train_rollout_logprob_abs_diff == pytest.approx(logged[0], rel=1e-5)
