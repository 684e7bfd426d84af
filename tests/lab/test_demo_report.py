"""The last step of the demo: a page about the dumps of this run, or a sentence that says why there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slime_instrument.lab.demo import _report

from ..report.dumps import write_run


def test_the_page_is_about_the_dumps_of_this_run_only(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    run = write_run(tmp_path, rollouts=3)
    page, verdict = _report(tmp_path, [run / "rollout_data" / "1.pt"], [run / "train_data" / "1.pt"])
    assert page == tmp_path / "report.html"
    assert "rollout 1 · slime_instrument" in page.read_text()
    assert verdict.startswith("Ok: no finding"), verdict


def test_without_the_library_the_demo_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    page, note = _report(tmp_path, [run / "rollout_data" / "0.pt"], [run / "train_data" / "0.pt"])
    assert page is None
    assert note == "No report.html: jinja2 is not installed (install slime-instrument[report])."
    assert not (tmp_path / "report.html").exists()
