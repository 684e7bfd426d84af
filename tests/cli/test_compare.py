"""compare, convert and export: documents, exit statuses, and text without colours in a pipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.format import builders

from ..report.dumps import write_run
from .outcomes import strict

CONTRACT = {
    "n_train", "n_rollout", "n_joined", "n_tokens", "abs_diff", "k1", "k2", "k3", "ess", "excluded", "unmatched",
    "findings", "worst",
}  # fmt: skip


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    payload = builders.v2()
    train = builders.save(payload, tmp_path / "train_data" / "7.pt")
    return builders.save(builders.rollout(payload), tmp_path / "rollout_data" / "7.pt"), train


def spoil(pair: tuple[Path, Path]) -> None:
    payload = builders.v2()
    payload["samples"][0]["log_probs"][0] = float("nan")
    builders.save(payload, pair[1])


def test_a_clean_pair_is_exit_0_and_one_document(call: Any, pair: tuple[Path, Path]) -> None:
    outcome = call("compare", *pair, "--json")
    document = strict(outcome.out)
    assert (outcome.code, outcome.err) == (0, "")
    assert set(document) >= CONTRACT
    assert set(document["abs_diff"]) == {"mean", "max", "p50", "p95", "p99"}
    assert set(document["excluded"]) == {"masked", "removed", "missing", "nan", "inf", "filler"}


def test_a_finding_is_exit_1_in_both_forms(call: Any, pair: tuple[Path, Path]) -> None:
    spoil(pair)
    outcome = call("compare", *pair, "--json")
    assert outcome.code == 1
    assert [(one["code"], one["samples"]) for one in strict(outcome.out)["findings"]] == [("non-finite", [0])]
    outcome = call("compare", *pair)
    assert outcome.code == 1
    assert "non-finite" in outcome.out
    assert "\x1b" not in outcome.out


def test_a_passed_threshold_is_exit_1_and_one_that_holds_is_0(call: Any, pair: tuple[Path, Path]) -> None:
    assert call("compare", *pair, "--fail-above", "abs_diff.mean=0.2").code == 0
    outcome = call("compare", *pair, "--fail-above", "abs_diff.mean=0.05", "--fail-above", "k3=9", "--json")
    assert outcome.code == 1
    assert [over["metric"] for over in strict(outcome.out)["passed_thresholds"]] == ["abs_diff.mean"]
    assert (
        "failed --fail-if 'abs_diff.mean>0.05': abs_diff.mean is 0.1"
        in call("compare", *pair, "--fail-above", "abs_diff.mean=0.05").out
    )


def test_the_trend_keeps_its_numbers_whole_on_80_columns(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    run = write_run(tmp_path / "run", rollouts=2)
    monkeypatch.setattr("slime_instrument._cli.compare.console", lambda: Console(width=80))
    outcome = call("compare", run)
    assert outcome.code == 0
    assert "…" not in outcome.out
    assert sum(" ok " in line for line in outcome.out.splitlines()) == 2, "one line for each rollout"


@pytest.mark.parametrize("threshold", ["abs_diff.mean", "no_metric=1", "k1=nan", "k1=-inf", "k1=inf", "=1"])
def test_a_threshold_that_means_nothing_is_exit_2(call: Any, pair: tuple[Path, Path], threshold: str) -> None:
    outcome = call("compare", *pair, "--fail-above", threshold)
    assert outcome.code == 2
    assert len(outcome.err.splitlines()) == 1


def test_folders_make_a_trend(call: Any, pair: tuple[Path, Path]) -> None:
    payload = builders.v2()
    payload["rollout_id"] = 8
    builders.save(payload, pair[1].with_name("8.pt"))
    builders.save(builders.rollout(payload), pair[0].with_name("8.pt"))
    outcome = call("compare", pair[0].parent, pair[1].parent, "--json")
    document = strict(outcome.out)
    assert outcome.code == 0
    assert document["trend"]["rollout_id"] == [7, 8]
    assert [set(one) >= CONTRACT for one in document["pairs"]] == [True, True]
    assert "mean |δ|" in call("compare", pair[0].parent, pair[1].parent).out


def test_the_histogram_has_every_token_in_it(call: Any, pair: tuple[Path, Path]) -> None:
    lines = [
        line
        for line in call("compare", *pair).out.splitlines()
        if line.startswith("  |δ| ") and (" to " in line or "and more" in line)
    ]
    assert sum(int(line.split()[-1]) for line in lines) == 12


def test_evaluations_and_foreign_files_are_exit_2(call: Any, pair: tuple[Path, Path]) -> None:
    evaluation = builders.save(builders.rollout(), pair[0].with_name("eval_7.pt"))
    broken = pair[0].with_name("broken.pt")
    broken.write_bytes(b"PK\x03\x04 and no more")
    for files in (
        (evaluation, pair[1]),
        (broken, pair[1]),
        (pair[0], broken),
        (pair[0], "gone.pt"),
    ):
        outcome = call("compare", *files)
        assert outcome.code == 2, files
        assert len(outcome.err.splitlines()) == 1
        assert outcome.out == ""


def test_objects_need_the_opt_in(call: Any, pair: tuple[Path, Path]) -> None:
    import torch

    dump = builders.rollout()
    dump["samples"][0]["metadata"] = {"o": Path("x")}
    torch.save(dump, pair[0])
    outcome = call("compare", *pair)
    assert outcome.code == 2
    assert "--allow-pickle" in outcome.err
    assert call("compare", *pair, "--allow-pickle").code == 0


@pytest.fixture
def old(tmp_path: Path) -> list[Path]:
    return [
        builders.save(builders.rank_file(rank, [rank, rank + 2]), tmp_path / "old" / f"7_{rank}.pt") for rank in (0, 1)
    ]


def test_convert_says_layout_samples_and_warnings(call: Any, old: list[Path], pair: tuple[Path, Path]) -> None:
    target = old[0].parents[1] / "new" / "7.pt"
    outcome = call("convert", *old, "-o", target, "--rollout", pair[0], "--json")
    document = strict(outcome.out)
    assert outcome.code == 0
    assert document["n_samples"] == 4
    assert document["layout"] == {"tp": 1, "pp": 1, "cp": 1, "dp": 2, "order": "tp-cp-dp-pp", "how": "inferred"}
    assert document["warnings"] == []
    assert call("validate", target, "--rollout", pair[0]).code == 0
    assert call("compare", pair[0], target).code == 0


def test_a_layout_that_does_not_fit_is_exit_2_and_no_file(call: Any, old: list[Path]) -> None:
    target = old[0].parent / "new.pt"
    outcome = call("convert", *old, "-o", target, "--tp", "2", "--pp", "1", "--cp", "1")
    assert outcome.code == 2
    assert "hold other samples" in outcome.err
    assert not target.exists()


def test_export_writes_a_table(call: Any, pair: tuple[Path, Path]) -> None:
    pl = pytest.importorskip("polars")
    target = pair[1].parents[1] / "out.parquet"
    outcome = call("export", pair[1], "-o", target, "--level", "token", "--json")
    assert outcome.code == 0
    assert strict(outcome.out)["n_rows"] == len(pl.read_parquet(target)) == 12
    assert call("export", pair[1].with_name("gone.pt"), "-o", target).code == 2


@pytest.mark.parametrize("command", ["compare", "convert", "export"])
def test_help_has_an_example(call: Any, command: str) -> None:
    assert "Example" in call(command, "--help").out


def test_annotations_that_have_nowhere_to_stand_are_refused_before_anything_is_read(
    call: Any, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    outcome = call("compare", *pair, "--annotations", "junit", "--annotations-file", tmp_path / "nowhere" / "x.xml")
    assert outcome.code == 2
    assert "no folder" in outcome.err
    assert "Traceback" not in outcome.err
