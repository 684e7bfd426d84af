"""What validate prints, and how it ends."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.format import builders

from .outcomes import strict


def test_a_valid_dump_is_exit_0_and_warnings_stand_apart(call: Any, dump: Path) -> None:
    outcome = call("validate", dump, "--json")
    document = strict(outcome.out)
    assert (outcome.code, document["valid"], document["errors"]) == (0, True, [])
    assert {finding["code"] for finding in document["warnings"]} == {"nan"}


def test_an_invalid_dump_is_exit_1_with_file_sample_and_field(call: Any, dump: Path, invalid: Path) -> None:
    outcome = call("validate", dump, invalid, "--json")
    document = strict(outcome.out)
    assert (outcome.code, document["valid"]) == (1, False)
    (error,) = document["errors"]
    assert set(error) == {"code", "message", "file", "sample", "field"}
    assert (error["code"], error["file"], error["sample"], error["field"]) == ("length", str(invalid), 1, "log_probs")
    text = call("validate", invalid)
    assert text.code == 1
    assert "[length] sample 1: log_probs has 5 values" in text.out
    assert "1 of 1 file read: 1 error," in text.out


def test_an_unreadable_file_is_exit_2_and_the_others_are_still_looked_at(call: Any, invalid: Path) -> None:
    empty = invalid.with_name("empty.pt")
    empty.touch()
    outcome = call("validate", empty, invalid, "--json")
    assert outcome.code == 2
    assert [finding["code"] for finding in strict(outcome.out)["errors"]] == ["unreadable", "length"]
    assert outcome.err.count("\n") == 1
    assert "is empty" in outcome.err


def test_a_rollout_file_with_objects_needs_the_opt_in(call: Any, tmp_path: Path) -> None:
    payload = {
        "rollout_id": 0,
        "samples": [{"index": 0, "tokens": [1], "response_length": 1, "o": SimpleNamespace(a=1)}],
    }
    torch.save(payload, tmp_path / "0.pt")
    for command in ("inspect", "validate"):
        refused = call(command, tmp_path / "0.pt")
        assert refused.code == 2
        assert "types.SimpleNamespace" in refused.err
        assert "--allow-pickle" in refused.err
        assert "Traceback" not in refused.err
        assert call(command, tmp_path / "0.pt", "--allow-pickle").code == 0


def test_with_a_folder_each_train_dump_is_held_against_its_own_rollout(call: Any, tmp_path: Path) -> None:
    payload = builders.v2()
    for rollout_id in (7, 8, 9):
        payload["rollout_id"] = rollout_id
        rollout = {**builders.rollout(payload), "rollout_id": rollout_id}
        if rollout_id == 8:
            rollout["samples"][2]["tokens"][-1] += 1
        if rollout_id != 9:
            builders.save(rollout, tmp_path / "rollout_data" / f"{rollout_id}.pt")
        builders.save(payload, tmp_path / "train_data" / f"{rollout_id}.pt")
    outcome = call("validate", tmp_path / "train_data", "--rollout", tmp_path / "rollout_data", "--json")
    found = [(Path(one["file"]).name, one["code"], one["sample"]) for one in strict(outcome.out)["errors"]]
    assert outcome.code == 1
    assert found == [("8.pt", "tokens-differ", 2), ("9.pt", "no-rollout-dump", None)]


def test_two_dumps_of_one_rollout_are_both_held_against_the_rollout_dump(call: Any, tmp_path: Path) -> None:
    payload = builders.v2()
    builders.save(builders.rollout(payload), tmp_path / "rollout_data" / "7.pt")
    right = builders.save(payload, tmp_path / "train_data" / "7.pt")
    payload["samples"][0]["tokens"][0] += 1
    wrong = builders.save(payload, tmp_path / "elsewhere" / "7.pt")
    for files in ((right, wrong), (wrong, right), (wrong,)):
        outcome = call("validate", *files, "--rollout", tmp_path / "rollout_data", "--json")
        errors = strict(outcome.out)["errors"]
        assert (outcome.code, {error["file"] for error in errors}) == (1, {str(wrong)})
