"""status, check and run only pass on what they are given, and turn errors into one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_instrument._activation.check import CheckResult
from slime_instrument._errors import InstrumentError
from slime_instrument._patching.patch import PatchStatus

from .outcomes import PATCH, strict


def test_status_prints_the_table_or_the_document(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import slime_instrument

    class Status:
        def as_dict(self) -> dict[str, Any]:
            return {"armed": True, "route": "environment", "settings": {}, "patches": [PATCH]}

        def __str__(self) -> str:
            return "a table"

    monkeypatch.setattr(slime_instrument, "status", Status, raising=False)
    assert strict(call("status", "--json").out)["patches"] == [PATCH]
    assert call("status").out == "a table\n"


@pytest.mark.parametrize(("written", "code"), [(True, 0), (False, 1)])
def test_check_is_exit_1_if_no_dump_will_be_written(call: Any, stand_in: Any, written: bool, code: int) -> None:
    patch = PatchStatus("data-loader", "positions", PATCH["target"], "ACTIVE", "", 2, 0)
    result = CheckResult(Path("/x"), "0.3.1", False, written, "The verdict.", (patch,))
    document = result.as_dict()
    stand_in("slime_instrument._activation.check", check=lambda slime: result)
    outcome = call("check", "--slime", "/x", "--json")
    assert (outcome.code, strict(outcome.out)) == (code, document)
    text = call("check")
    assert text.code == code
    assert text.out.splitlines()[:2] == ["The verdict.", "slime 0.3.1 at /x: has no v2 dump of its own"]
    assert "process_rollout_data" in text.out


def test_an_error_of_ours_is_one_line_and_exit_2(call: Any, stand_in: Any) -> None:
    def probe(slime: Path | None) -> None:
        raise InstrumentError(f"{slime} is\nnot slime")

    stand_in("slime_instrument._activation.check", check=probe)
    outcome = call("check", "--slime", "/x", "--json")
    assert (outcome.code, outcome.err) == (2, "slime_instrument: /x is not slime\n")
    assert strict(outcome.out) == {"error": "/x is not slime"}


def test_a_folder_without_dumps_is_named_by_convert(call: Any, tmp_path: Path) -> None:
    outcome = call("convert", tmp_path, "-o", tmp_path / "0.pt")
    assert outcome.code == 2
    assert f"{tmp_path}: holds no dumps. Nothing was converted." in outcome.err


@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_run_passes_the_command_on_with_its_options(call: Any, stand_in: Any, dashes: list[str]) -> None:
    seen: list[list[str]] = []

    def launch(command: list[str]) -> None:
        seen.append(command)

    stand_in("slime_instrument._activation.launcher", launch=launch)
    assert call("run", *dashes, "python", "train.py", "--json", "--help", "-x").code == 0
    assert seen == [["python", "train.py", "--json", "--help", "-x"]]
