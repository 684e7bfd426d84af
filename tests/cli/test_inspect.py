"""What inspect prints, and how it ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from .outcomes import strict


def test_inspect_puts_one_json_document_on_stdout(call: Any, dump: Path) -> None:
    outcome = call("inspect", dump, "--sample", "1", "--json")
    document = strict(outcome.out)
    assert (outcome.code, outcome.err) == (0, "")
    assert set(document) >= {"kind", "format_version", "rollout_id", "n_samples", "fields", "dp_shards", "sample"}
    assert document["sample"]["log_probs"] == [-1.0, None]


def test_inspect_prints_plain_text_in_a_pipe(call: Any, dump: Path) -> None:
    outcome = call("inspect", dump, "--sample", "0")
    assert outcome.code == 0
    assert "\x1b" not in outcome.out
    assert "train-v2, format version 2" in outcome.out
    assert "log_probs: [-1.0, None]  [not finite: nan 1]" in outcome.out


@pytest.mark.parametrize("as_json", [False, True])
def test_a_sample_that_is_not_there_is_exit_2_with_a_clear_line(call: Any, dump: Path, as_json: bool) -> None:
    outcome = call("inspect", dump, "--sample", "2", *(["--json"] if as_json else []))
    assert outcome.code == 2
    assert outcome.err == f"slime-instrument: {dump}: has samples 0 to 1, but sample 2 was asked for.\n"
    if as_json:
        assert "sample 2 was asked for" in strict(outcome.out)["error"]
    else:
        assert outcome.out == ""
