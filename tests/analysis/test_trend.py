"""Pairs of several rollouts make a series."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_instrument._analysis.compare import compare
from slime_instrument._analysis.trend import trend
from slime_instrument._format.pairs import find_pairs
from tests.format import builders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in (0, 2, 10):
        payload = builders.v2()
        payload["rollout_id"] = i
        for n, sample in enumerate(payload["samples"]):
            sample["log_probs"] = sample["rollout_log_probs"] - i / 100 * (-1) ** n
        builders.save(payload, tmp_path / "train_data" / f"{i}.pt")
        builders.save(builders.rollout(payload), tmp_path / "rollout_data" / f"{i}.pt")
    builders.save(builders.rollout(payload), tmp_path / "rollout_data" / "eval_10.pt")
    builders.save(builders.rollout(payload) | {"rollout_id": 11}, tmp_path / "rollout_data" / "11.pt")
    return tmp_path


def test_the_trend_is_one_entry_per_rollout(folder: Path) -> None:
    series = trend([compare(pair.rollout, pair.train[0]) for pair in find_pairs([folder]).pairs])
    assert series["rollout_id"] == [0, 2, 10]
    assert series["abs_diff_mean"] == [pytest.approx(i / 100, abs=1e-6) for i in (0, 2, 10)]
    assert series["findings"] == [[], [], []]
