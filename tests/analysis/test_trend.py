"""Files are paired by rollout, and the pairs make a series."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slime_instrument._analysis.compare import compare
from slime_instrument._analysis.thresholds import ThresholdError, parse_threshold, passed
from slime_instrument._analysis.trend import pair_files, trend
from slime_instrument._errors import DumpFormatError

sys.path.insert(0, str(Path(__file__).parents[1] / "format"))
import builders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in (0, 2, 10):
        payload = builders.v2()
        payload["rollout_id"] = i
        for sample in payload["samples"]:
            sample["log_probs"] = sample["rollout_log_probs"] - i / 100
        builders.save(payload, tmp_path / "train_data" / f"{i}.pt")
        builders.save(builders.rollout(payload), tmp_path / "rollout_data" / f"{i}.pt")
    builders.save(builders.rollout(payload), tmp_path / "rollout_data" / "eval_10.pt")
    builders.save(builders.rollout(payload) | {"rollout_id": 11}, tmp_path / "rollout_data" / "11.pt")
    return tmp_path


def test_folders_are_paired_by_rollout_id_without_evaluations(folder: Path) -> None:
    pairs = pair_files(folder / "rollout_data", [folder / "train_data"])
    assert [(pair.rollout_id, pair.rollout.name, [path.name for path in pair.train]) for pair in pairs] == [
        (i, f"{i}.pt", [f"{i}.pt"]) for i in (0, 2, 10)
    ]


def test_old_files_of_one_rollout_stay_together(folder: Path) -> None:
    for rank in range(2):
        builders.save(builders.rank_file(rank, [rank, rank + 2]), folder / "old" / f"7_{rank}.pt")
    builders.save(builders.rollout(), folder / "7.pt")
    (pair,) = pair_files(folder / "7.pt", [folder / "old"])
    assert [path.name for path in pair.train] == ["7_0.pt", "7_1.pt"]


def test_dumps_of_other_rollouts_are_no_pair(folder: Path) -> None:
    with pytest.raises(DumpFormatError, match="Nothing was compared"):
        pair_files(folder / "rollout_data" / "11.pt", [folder / "train_data"])


def test_the_trend_is_one_entry_per_rollout(folder: Path) -> None:
    pairs = pair_files(folder / "rollout_data", [folder / "train_data"])
    series = trend([compare(pair.rollout, pair.train[0]) for pair in pairs])
    assert series["rollout_id"] == [0, 2, 10]
    assert series["abs_diff_mean"] == [pytest.approx(i / 100, abs=1e-6) for i in (0, 2, 10)]
    assert series["findings"] == [[], [], []]


def test_thresholds_compare_one_number_of_the_record(folder: Path) -> None:
    record = compare(folder / "rollout_data" / "10.pt", folder / "train_data" / "10.pt")
    limits = [parse_threshold(text) for text in ("abs_diff.mean=0.05", "abs_diff.max=0.2", "excluded.nan=0", "k3=1")]
    assert [over["metric"] for over in passed(record, limits)] == ["abs_diff.mean"]
    assert parse_threshold("abs_diff=0.5").metric == "abs_diff.mean"


@pytest.mark.parametrize("text", ["abs_diff.mean", "=3", "k3=much", "k3=nan"])
def test_a_threshold_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ThresholdError, match="expected METRIC=VALUE"):
        parse_threshold(text)


@pytest.mark.parametrize("metric", ["nothing", "abs_diff.median", "rollout", "findings", "drift.decile"])
def test_a_metric_that_is_none_is_refused_with_the_names(folder: Path, metric: str) -> None:
    record = compare(folder / "rollout_data" / "10.pt", folder / "train_data" / "10.pt")
    with pytest.raises(ThresholdError, match=r"abs_diff\.p99"):
        passed(record, [parse_threshold(f"{metric}=1")])


def test_two_rollout_dumps_of_one_rollout_are_not_paired_silently(tmp_path: Path) -> None:
    payload = builders.v2()
    for name in ("7", "copy_of_7"):
        builders.save(builders.rollout(payload), tmp_path / "rollout" / f"{name}.pt")
    train = builders.save(payload, tmp_path / "train" / "7.pt")
    with pytest.raises(DumpFormatError, match=r"copy_of_7\.pt: is of rollout 7, and so is .*7\.pt"):
        pair_files(tmp_path / "rollout", [train])


@pytest.mark.parametrize("name", ["²_x.pt", "٣.pt", "x.pt", "9" * 50 + ".pt"])
def test_a_name_without_a_number_that_counts_gives_no_rollout_id(tmp_path: Path, name: str) -> None:
    payload = builders.v2()
    source = builders.rollout(payload)["samples"]  # a list of samples: only the name could tell
    builders.save(source, tmp_path / "rollout" / name)
    train = builders.save(payload, tmp_path / "train" / "7.pt")
    with pytest.raises(DumpFormatError, match="Nothing was compared"):
        pair_files(tmp_path / "rollout", [train])
