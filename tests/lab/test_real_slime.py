"""Real slime trains in the lab, where a checkout is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument.lab import LabOptions, rollout_log_probs_from, train

pytestmark = pytest.mark.real_slime


def test_real_slime_trains_and_writes_its_native_dump(checkout: Callable[[str], Path], tmp_path: Path) -> None:
    result = train(
        LabOptions(out=tmp_path, slime=checkout("681b3adca"), cp=2, dp=2, steps=2, rollouts=2, instrumented=False)
    )
    assert result.target == "slime"
    assert result.slime_version == "0.3.1"
    assert [path.name for path in result.train_dumps] == ["0.pt", "1.pt"]
    payload = torch.load(result.train_dumps[0], weights_only=True)
    assert payload["format_version"] == 2
    assert [sample["rollout_position"] for sample in payload["samples"]] == list(range(8))

    known = torch.load(rollout_log_probs_from(result.train_dumps, tmp_path / "known.pt"), weights_only=True)
    assert sorted(known) == [0, 1]
    assert known[0][3] != known[1][3]
    nearly = torch.tensor(known[0][3])
    assert not torch.equal(nearly, payload["samples"][3]["log_probs"])
    torch.testing.assert_close(nearly, payload["samples"][3]["log_probs"], rtol=0.03, atol=0.0)


def test_the_miniature_reports_the_figures_that_real_slime_reports(
    checkout: Callable[[str], Path], tmp_path: Path
) -> None:
    """Same weights, same samples: whatever the two have in common comes out alike, over two steps, with a reference."""
    recipe: dict[str, Any] = {
        "cp": 2,
        "dp": 2,
        "steps": 2,
        "samples": "edge",
        "with_ref": True,
        "overrides": {"use_kl_loss": True, "kl_coef": 0.05, "kl_loss_coef": 0.1},
        "instrumented": False,
    }
    real = train(LabOptions(out=tmp_path / "real", slime=checkout("681b3adca~1"), **recipe))
    ours = train(LabOptions(out=tmp_path / "miniature", **recipe))
    compared = 0
    for metrics in ours.logged_metrics:
        step_key = next(key for key in metrics if key.endswith("/step"))
        expected = next(
            one
            for one in real.logged_metrics
            if one.get(step_key) == metrics[step_key] and metrics.keys() <= one.keys()
        )
        # slime counts kl once for each context-parallel rank; the miniature does not follow it there.
        common = metrics.keys() - {"rollout/kl"}
        assert {key: metrics[key] for key in common} == pytest.approx({key: expected[key] for key in common}, abs=1e-4)
        compared += len(common)
    assert compared > 25
