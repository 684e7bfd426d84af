"""Interpreter starts: which ways are compared, and that the import stays light."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_starts_take_turns_and_the_import_brings_nothing_heavy(run_json: Callable[..., Any]) -> None:
    found = run_json("startup", "--repeats", "3")
    assert found["start_s"].keys() == {"without", "installed_off", "installed_0", "on"}
    assert {figure["n"] for figure in found["start_s"].values()} == {3}
    assert found["import_brings"] == "[]"
