"""What inspect prints, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

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
    assert outcome.err == f"slime_instrument: {dump}: has samples 0 to 1, but sample 2 was asked for.\n"
    if as_json:
        assert "sample 2 was asked for" in strict(outcome.out)["error"]
    else:
        assert outcome.out == ""


@pytest.mark.parametrize("rank", ["[/red]", "[bold]", "\x1b[31m", "\ud800", "²", None, [1, 2], {"a": 1}])
def test_what_a_file_says_is_text_not_markup_nor_a_command_to_the_terminal(call: Any, dump: Path, rank: Any) -> None:
    payload = torch.load(dump, weights_only=True)
    payload["dp_shards"] = [{"data_parallel_rank": rank}]
    payload["samples"][0]["[/x] \x1b]0;y\x07"] = "[/y] \x1b[2J"
    torch.save(payload, dump)
    outcome = call("inspect", dump, "--sample", "0")
    assert (outcome.code, outcome.err) == (0, "")
    assert "\x1b" not in outcome.out
    assert "[/x] \\x1b]0;y\\x07: [/y] \\x1b[2J" in outcome.out
    assert strict(call("inspect", dump, "--sample", "0", "--json").out)["sample"]["[/x] \x1b]0;y\x07"] == "[/y] \x1b[2J"


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
@pytest.mark.parametrize("as_json", [False, True])
def test_what_stdout_cannot_encode_is_escaped(dump: Path, encoding: str, as_json: bool) -> None:
    said = "é 😀 \ud800"
    payload = torch.load(dump, weights_only=True)
    payload["samples"][0]["response"] = said
    torch.save(payload, dump)
    program = "from slime_instrument._cli.app import main; main()"
    command = [sys.executable, "-c", program, "inspect", str(dump), "--sample", "0"]
    done = subprocess.run(
        command + ["--json"] * as_json,
        env={**os.environ, "PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    if as_json:
        assert strict(done.stdout.decode(encoding))["sample"]["response"] == said
    else:
        assert b"\\ud800" in done.stdout
