"""Dumps that refer to tensor files, through every command that reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument import compare
from slime_instrument._errors import DumpFormatError
from slime_instrument._format.dumps import read_rollout_dump
from slime_instrument._format.references import count_references
from slime_instrument._format.summary import inspect_dump
from slime_instrument._validate import validate_files
from tests.format import builders
from tests.format.test_references import EXPERTS, FIELD, written
from tests.tensor_files import tensor_store


def test_everything_else_is_read_when_files_are_gone_and_they_are_named(tmp_path: Path, call: Any) -> None:
    rollout, train = written(tmp_path)
    gone = tmp_path / "rollout_data/7_r3_spill/0123abcd/1_experts.safetensors"
    gone.unlink()
    counts = {"total": 4, "missing": 1, "first_missing": str(gone)}
    assert inspect_dump(rollout)["references"] == counts
    fields = inspect_dump(rollout)["fields"][FIELD]
    assert (fields["type"], fields["dtype"], fields["shape"]["min"]) == ("reference", "uint8", [5, 2, 2])
    assert inspect_dump(rollout, sample=1)["sample"][FIELD]["missing"] is True
    with pytest.raises(DumpFormatError, match=r"1_experts\.safetensors: is gone"):
        read_rollout_dump(rollout).samples[1][FIELD].load()

    report = validate_files([rollout, train], rollout=rollout)
    assert report.valid
    assert [(one.code, one.field, one.file) for one in report.warnings] == [("missing-file", FIELD, str(rollout))]

    compared = compare(rollout, train)
    assert compared.n_joined == 4
    assert compared["references"] == {
        "rollout": counts,
        "train": {"total": 4, "missing": 0, "first_missing": None},
    }
    assert str(gone) in compared.warnings[0]

    for command in (("inspect", rollout), ("compare", rollout, train)):
        outcome = call(*command)
        assert "4 tensors in files of their own, 1 of which are gone" in " ".join(outcome.out.split()), outcome.err
    assert call("validate", rollout).code == 0
    assert call("export", rollout, train, "-o", tmp_path / "all.parquet", "--json").code == 0
    assert call("report", tmp_path, "-o", tmp_path / "report.html", "--json").code in (0, 1)
    assert "1 of which are gone" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("moved", [False, True])
def test_an_extract_holds_slimes_own_objects_which_load_their_files(tmp_path: Path, call: Any, moved: bool) -> None:
    rollout, _ = written(tmp_path / "before")
    if moved:
        shutil.move(tmp_path / "before", tmp_path / "after")
        rollout = tmp_path / "after/rollout_data/7.pt"
    out = tmp_path / "few.pt"
    outcome = call("extract", rollout, "--samples", "1", "-o", out, "--json")
    assert outcome.code == 0, outcome.err
    assert any("refers to 4 tensors" in one for one in json.loads(outcome.out)["warnings"])
    with tensor_store() as Reference:
        samples = torch.load(out, weights_only=False)["samples"]
        assert [type(sample[FIELD]) for sample in samples] == [Reference] * 4
        assert torch.equal(samples[1][FIELD].load(), EXPERTS + 1)
        if not moved:
            saved = torch.load(rollout, weights_only=False)["samples"]
            assert [sample[FIELD] for sample in samples] == [sample[FIELD] for sample in saved]
    assert count_references(read_rollout_dump(out).samples).missing == 0


@pytest.mark.parametrize("field", [*builders.sample(0), *builders.rollout()["samples"][0]])
def test_a_reference_in_the_place_of_any_field_breaks_no_command(tmp_path: Path, call: Any, field: str) -> None:
    """Whatever a damaged file refers to: a command ends with a status of its own, and says why in one document."""
    rollout, train = written(tmp_path)
    with tensor_store() as Reference:
        for path in (rollout, train):
            payload = torch.load(path, weights_only=False)
            for sample in payload["samples"]:
                if field in sample:
                    sample[field] = sample[FIELD]
            assert Reference is type(payload["samples"][0][FIELD])
            torch.save(payload, path)
    for command in (
        ("inspect", train, "--sample", "0"),
        ("validate", train, rollout, "--rollout", rollout),
        ("compare", rollout, train),
        ("audit", rollout, train),
        ("what-if", rollout, train),
        ("export", rollout, train, "-o", tmp_path / "all.parquet"),
        ("export", rollout, train, "-o", tmp_path / "all.parquet", "--level", "token"),
        ("report", rollout, train, "-o", tmp_path / "report.html"),
        ("extract", rollout, "--samples", "1", "-o", tmp_path / "few.pt"),
    ):
        outcome = call(*command, "--json")
        assert outcome.code in (0, 1, 2), (command, outcome.err)
        assert json.loads(outcome.out), command
