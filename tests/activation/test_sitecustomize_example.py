"""``sitecustomize_example`` on PYTHONPATH: arms where nothing can be installed, and is nobody's enemy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "sitecustomize_example"
ROUTE = "from slime_instrument._switch import route; answer = route()"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A sitecustomize of the user's own."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import builtins\nbuiltins.ran = getattr(builtins, 'ran', 0) + 1\n")
    return folder


def test_it_arms_where_the_package_is_only_on_the_path(uninstalled: Any) -> None:
    assert uninstalled.answer(ROUTE, path=[EXAMPLE], SLIME_INSTRUMENT="1") == "sitecustomize on PYTHONPATH"


def test_without_it_the_variable_alone_arms_nothing_there(uninstalled: Any) -> None:
    code = "import sys; answer = 'slime_instrument' in sys.modules"
    assert uninstalled.answer(code, SLIME_INSTRUMENT="1") is False


def test_targets_are_patched_when_slime_is_imported(uninstalled: Any, fake_slime: Path) -> None:
    code = """
        import slime.backends.megatron_utils.actor, slime_instrument
        status = slime_instrument.status()
        answer = [status.route, status["train-actor"].state]
    """
    assert uninstalled.answer(code, path=[EXAMPLE, fake_slime], SLIME_INSTRUMENT="1") == [
        "sitecustomize on PYTHONPATH",
        "ACTIVE",
    ]


@pytest.mark.parametrize("variables", [{}, {"SLIME_INSTRUMENT": "0"}, {"SLIME_INSTRUMENT": " Off "}])
def test_off_it_imports_nothing_of_ours_and_says_nothing(uninstalled: Any, variables: dict[str, str]) -> None:
    done = uninstalled.run("-X", "importtime", "-c", "pass", path=[EXAMPLE], **variables)
    assert "sitecustomize" in done.stderr
    assert "slime" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_users_own_sitecustomize_runs_once_and_is_the_one_in_sys_modules(
    uninstalled: Any, mine: Path, switch: str
) -> None:
    code = "import builtins, sitecustomize; answer = [builtins.ran, sitecustomize.__file__]"
    expected = [1, str(mine / "sitecustomize.py")]
    assert uninstalled.answer(code, path=[EXAMPLE, mine], SLIME_INSTRUMENT=switch) == expected


def test_a_path_that_a_launch_script_puts_in_front_changes_nothing(
    uninstalled: Any, mine: Path, fake_slime: Path
) -> None:
    code = f"import builtins; {ROUTE}; answer = [answer, builtins.ran]"
    assert uninstalled.answer(code, path=[fake_slime, EXAMPLE, mine], SLIME_INSTRUMENT="1") == [
        "sitecustomize on PYTHONPATH",
        1,
    ]


def test_behind_the_users_own_it_is_shadowed_and_theirs_still_runs(uninstalled: Any, mine: Path) -> None:
    code = "import builtins, sys; answer = [builtins.ran, 'slime_instrument' in sys.modules]"
    assert uninstalled.answer(code, path=[mine, EXAMPLE], SLIME_INSTRUMENT="1") == [1, False]


def test_two_copies_on_the_path_do_not_call_each_other_for_ever(uninstalled: Any, mine: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    code = f"import builtins; {ROUTE}; answer = [answer, builtins.ran]"
    path = [EXAMPLE, copy, EXAMPLE, mine]
    assert uninstalled.answer(code, path=path, SLIME_INSTRUMENT="1") == ["sitecustomize on PYTHONPATH", 1]


def test_an_error_in_the_users_own_is_reported_and_the_interpreter_starts(uninstalled: Any, mine: Path) -> None:
    (mine / "sitecustomize.py").write_text("1 / 0\n")
    done = uninstalled.run("-c", "print('started')", path=[EXAMPLE, mine], SLIME_INSTRUMENT="1")
    assert done.stdout == "started\n"
    assert "Error in sitecustomize" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_a_folder_that_merely_has_the_name_is_no_sitecustomize(uninstalled: Any, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize").mkdir()
    assert uninstalled.answer(ROUTE, path=[EXAMPLE, tmp_path], SLIME_INSTRUMENT="1") == "sitecustomize on PYTHONPATH"


def test_without_the_package_it_is_silent(new_environment: Any) -> None:
    done = new_environment().run("-c", "print('started')", path=[EXAMPLE], SLIME_INSTRUMENT="1")
    assert (done.stdout, done.stderr) == ("started\n", "")


def test_with_the_package_installed_too_the_start_file_came_first(installed: Any) -> None:
    assert installed.answer(ROUTE, path=[EXAMPLE], SLIME_INSTRUMENT="1") == (
        "SLIME_INSTRUMENT in the environment (.pth)"
    )
