"""``report`` and ``view`` as commands: options, JSON, exit status."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from ..report.dumps import one_bad_token, write_run
from .outcomes import strict


def test_json_has_the_keys_that_checks_read(call: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rollouts=2)
    (run / "rollout_data" / "eval_1.pt").write_bytes((run / "rollout_data" / "1.pt").read_bytes())
    page = tmp_path / "page.html"
    outcome = call("report", run, "-o", page, "--json")
    document = strict(outcome.out)
    assert outcome.code == 0
    assert document["report"] == str(page)
    assert page.stat().st_size == document["bytes"]
    assert document["pairs"] == [
        {"rollout": str(run / "rollout_data" / f"{i}.pt"), "train": str(run / "train_data" / f"{i}.pt")} for i in (0, 1)
    ]
    assert document["skipped"] == [
        {"file": str(run / "rollout_data" / "eval_1.pt"), "reason": "dump of an evaluation; no training belongs to it"}
    ]
    assert "eval_1.pt" in outcome.err


def test_the_verdict_is_printed_and_a_fault_in_the_data_is_no_failure(call: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", samples=16, change=one_bad_token)
    outcome = call("report", run / "rollout_data" / "0.pt", run / "train_data" / "0.pt", "-o", tmp_path / "page.html")
    assert outcome.code == 0
    assert outcome.out.startswith("Unexplained: differs more than kernels do, cause not shown; ")
    assert "Worst token: Sample 5, token 7" in outcome.out


def test_a_file_that_cannot_be_read_is_exit_2_and_the_page_is_about_the_others(call: Any, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rollouts=2)
    (run / "train_data" / "1.pt").write_bytes(b"PK\x03\x04 cut")
    outcome = call("report", run, "-o", tmp_path / "page.html")
    assert outcome.code == 2
    assert "page.html: 1 rollout," in outcome.out
    assert f"not used: {run / 'train_data' / '1.pt'}: is a cut" in outcome.err


@pytest.mark.parametrize("given", [["absent.pt"], ["."], ["run/rollout_data/0.pt"]])
def test_nothing_to_report_on_is_exit_2_and_one_line(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    write_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    outcome = call("report", *given, "--json")
    assert outcome.code == 2
    assert set(strict(outcome.out)) == {"error"}
    assert len(outcome.err.splitlines()) == 1
    assert not (tmp_path / "report.html").exists()


def test_a_missing_library_is_named_with_the_way_to_get_it(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    outcome = call("report", run, "-o", tmp_path / "page.html")
    assert outcome.code == 2
    assert "install slime-instrument[report]" in outcome.err
    monkeypatch.setitem(sys.modules, "textual", None)
    outcome = call("view", run)
    assert outcome.code == 2
    assert "install slime-instrument[view]" in outcome.err


def test_view_opens_what_it_was_given(call: Any, tmp_path: Path, stand_in: Any) -> None:
    pytest.importorskip("textual")
    seen: list[Any] = []
    stand_in("slime_instrument._view.app", view_dumps=lambda dumps, **options: seen.append((dumps, options)))
    outcome = call("view", tmp_path, "--rollout", "3")
    assert outcome.code == 0
    assert seen == [([tmp_path], {"rollout": 3, "tokenizer": None, "allow_pickle": False})]
