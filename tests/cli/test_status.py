"""``status FOLDER``: what a run wrote about itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slime_instrument._format import journal


def run_of(folder: Path, *events: tuple[str, dict[str, Any]]) -> Path:
    folder.mkdir()
    start = {**journal.process(), "route": "a test", "layout": {"context_parallel": 2}, "versions": {"slime": "0.3.1"}}
    for event, values in (("start", start), *events):
        journal.Writer(folder).append(event, **values)
    return folder


WRITTEN = ("written", {"rollout_id": 0, "path": "0.pt", "bytes": 9, "blocked_s": 0.5})
LOST = ("lost", {"rollout_id": 1, "path": "1.pt", "reason": "No space left on device"})


def test_a_run_that_lost_nothing_is_fine(call: Any, tmp_path: Path) -> None:
    outcome = call("status", run_of(tmp_path / "train_data", WRITTEN))
    assert outcome.code == 0
    assert "dumps: 1 written" in outcome.out
    assert "is running" in outcome.out


def test_a_lost_dump_is_named_with_its_reason(call: Any, tmp_path: Path) -> None:
    run_of(tmp_path / "train_data", WRITTEN, LOST)
    outcome = call("status", tmp_path)
    assert outcome.code == 1
    assert "rollout 1 has no dump: No space left on device" in outcome.out


def test_json_says_the_same(call: Any, tmp_path: Path) -> None:
    outcome = call("status", run_of(tmp_path / "train_data", WRITTEN, LOST), "--json")
    document = json.loads(outcome.out)
    assert [one["state"] for one in document["rollouts"]] == ["written", "lost"]
    assert (document["healthy"], outcome.code) == (False, 1)


def test_a_folder_without_a_journal_cannot_be_looked_at(call: Any, tmp_path: Path) -> None:
    outcome = call("status", tmp_path)
    assert outcome.code == 2
    assert "holds no instrument.jsonl" in outcome.err


def test_a_dump_is_not_taken_for_a_journal(call: Any, tmp_path: Path) -> None:
    (tmp_path / "0.pt").write_bytes(b"PK\n\n")
    outcome = call("status", tmp_path / "0.pt")
    assert (outcome.code, outcome.out) == (2, "")
    assert "is no instrument.jsonl" in outcome.err


def test_a_misspelt_setting_is_named(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_INSTRUMENT_EVRY", "3")
    outcome = call("status")
    assert outcome.code == 0
    assert "ignored unknown settings: SLIME_INSTRUMENT_EVRY" in outcome.err
