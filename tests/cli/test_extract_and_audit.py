"""The two commands over a rollout that is right, and over one with a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.analysis.test_audit import Run, other_reward
from tests.cli.outcomes import strict


def written(run: Run, folder: Path, **more: Any) -> tuple[Path, Path]:
    pair = run.pair()
    rollout, train = folder / "rollout.pt", folder / "train.pt"
    torch.save({"rollout_id": 5, "samples": run.rollout, **more}, rollout)
    torch.save(
        {
            "format_version": 2,
            "rollout_id": 5,
            "rank": 0,
            "samples": run.train,
            "dp_shards": pair.train.dp_shards,
        },
        train,
    )
    return rollout, train


@pytest.fixture
def dumps(tmp_path: Path) -> tuple[Path, Path]:
    return written(Run(), tmp_path)


def test_an_audit_of_what_is_right_ends_with_0(call: Any, dumps: tuple[Path, Path]) -> None:
    outcome = call("audit", *dumps, "--json")
    assert outcome.code == 0, outcome.err
    document = strict(outcome.out)
    assert document["findings"] == []
    assert len(document["groups"]) == 4
    assert document["gradient"]["n_samples"] == 16
    assert "no findings" in call("audit", *dumps).out


def test_an_audit_that_finds_something_ends_with_1_and_names_the_samples(call: Any, tmp_path: Path) -> None:
    run = Run()
    other_reward(run)
    outcome = call("audit", *written(run, tmp_path), "--json")
    assert outcome.code == 1
    (finding,) = strict(outcome.out)["findings"]
    assert (finding["code"], finding["samples"]) == ("reward-mismatch", [6])
    assert finding["numbers"]["largest_difference"] == pytest.approx(0.5, abs=1e-5)


def test_an_argument_that_the_dump_lacks_may_be_given(call: Any, tmp_path: Path) -> None:
    run = Run()
    recorded, run.arguments = run.arguments, {}
    dumps = written(run, tmp_path)
    assert "not checked: rewards" in call("audit", *dumps).out
    given = [f"--argument={name}={value}" for name, value in recorded.items()]
    assert strict(call("audit", *dumps, *given, "--json").out)["checked"] == ["rewards", "kl", "returns", "advantages"]


def test_an_extract_has_whole_groups_and_says_how_to_train_it(call: Any, dumps: tuple[Path, Path]) -> None:
    out = dumps[0].with_name("mi{ni.pt")
    outcome = call("extract", *dumps, "--samples", "6,12-13", "-o", out, "--json")
    assert outcome.code == 0, outcome.err
    document = strict(outcome.out)
    assert document["positions"] == [4, 5, 6, 7, 12, 13, 14, 15]
    assert document["warnings"] == []
    assert document["arguments"] == {
        "--load-debug-rollout-data": str(out).replace("{", "{{"),
        "--rollout-batch-size": "2",
        "--n-samples-per-prompt": "4",
        "--global-batch-size": "8",
        "--start-rollout-id": "0",
        "--num-rollout": "1",
    }
    payload = torch.load(out, weights_only=False)
    assert payload["rollout_id"] == 5
    assert payload["samples"] == [Run().rollout[position] for position in document["positions"]]


def test_what_is_not_known_in_a_sample_is_kept_untouched(call: Any, tmp_path: Path) -> None:
    run = Run()
    whole = torch.arange(600.0)
    for position, sample in enumerate(run.rollout):
        sample["mine"] = {"deep": [position, ("a", None)], b"key": 1.5}
        sample["experts"] = numpy.arange(6, dtype=numpy.int32).reshape(2, 3) + position
        sample["part"] = whole[position * 10 : position * 10 + 10]
    rollout, _ = written(run, tmp_path, mine="too")
    outcome = call("extract", rollout, "--samples", "3", "-o", tmp_path / "mini.pt")
    assert outcome.code == 0, outcome.err
    assert "whether advantages stay the same was not checked" in outcome.err
    payload = torch.load(tmp_path / "mini.pt", weights_only=False)
    assert payload["mine"] == "too"
    assert len(payload["samples"]) == 4
    for sample, before in zip(payload["samples"], run.rollout[:4], strict=True):
        assert sample["mine"] == before["mine"]
        assert type(sample["experts"]) is numpy.ndarray
        assert sample["experts"].dtype == numpy.int32
        assert (sample["experts"] == before["experts"]).all()
        assert torch.equal(sample["part"], before["part"])
        assert sample["part"].untyped_storage().nbytes() == 40


def test_the_worst_are_those_with_the_largest_mean_difference(call: Any, tmp_path: Path) -> None:
    run = Run()
    for position in (9, 2):
        run.train[position]["log_probs"] = run.train[position]["log_probs"] - position
    outcome = call("extract", *written(run, tmp_path), "--worst", "2", "-o", tmp_path / "mini.pt", "--json")
    assert strict(outcome.out)["chosen"] == [2, 9]


def test_the_samples_of_a_finding_are_chosen_by_its_code(call: Any, tmp_path: Path) -> None:
    run = Run()
    other_reward(run)
    dumps = written(run, tmp_path)
    outcome = call("extract", *dumps, "--finding", "reward-mismatch", "-o", tmp_path / "mini.pt", "--json")
    assert strict(outcome.out)["chosen"] == [6]
    outcome = call("extract", *dumps, "--finding", "temperature", "-o", tmp_path / "none.pt")
    assert outcome.code == 2
    assert "reward-mismatch" in outcome.err
    assert not (tmp_path / "none.pt").exists()


def test_a_dump_is_split_into_one_file_for_each_status(call: Any, tmp_path: Path) -> None:
    run = Run()
    run.rollout[14]["status"] = "truncated"
    rollout, _ = written(run, tmp_path)
    outcome = call("extract", rollout, "--split-by", "status", "-o", tmp_path / "by.pt", "--json")
    files = {one["label"]: one for one in strict(outcome.out)["files"]}
    assert files["truncated"]["chosen"] == [14]
    assert files["truncated"]["positions"] == [12, 13, 14, 15]
    assert len(files["completed"]["chosen"]) == 15
    assert (tmp_path / "by-truncated.pt").exists()


def test_what_changes_advantages_is_warned_of(call: Any, tmp_path: Path) -> None:
    run = Run(arguments={"normalize_advantages": True, "rollout_batch_size": 3})
    outcome = call("extract", *written(run, tmp_path), "--samples", "0", "-o", tmp_path / "mini.pt", "--json")
    warnings = " ".join(strict(outcome.out)["warnings"])
    assert "whitens over the whole batch" in warnings
    assert "normalised rewards over all of them" in warnings


def test_a_finding_that_is_not_there_is_refused_with_those_that_are(call: Any, dumps: tuple[Path, Path]) -> None:
    outcome = call("extract", *dumps, "--finding", "stale", "-o", dumps[0].with_name("mini.pt"))
    assert outcome.code == 2
    assert "expected a finding, of which these dumps have none, found 'stale'" in outcome.err


@pytest.mark.parametrize(
    "arguments",
    [("--samples", "99"), ("--samples", "a"), (), ("--worst", "2"), ("--samples", "1", "--worst", "2")],
)
def test_what_cannot_be_chosen_writes_nothing(call: Any, dumps: tuple[Path, Path], arguments: tuple[str, ...]) -> None:
    out = dumps[0].with_name("mini.pt")
    assert call("extract", dumps[0], *arguments, "-o", out).code == 2
    assert not out.exists()


def test_a_file_that_cannot_be_read_ends_an_audit_with_2_whatever_was_found(call: Any, tmp_path: Path) -> None:
    run = Run()
    other_reward(run)
    written(run, tmp_path)
    (tmp_path / "odd.pt").write_bytes(b"cut short")
    outcome = call("audit", tmp_path, "--json")
    assert strict(outcome.out)["findings"]
    assert outcome.code == 2
