"""``slime-instrument run``: the command itself, armed."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from slime_instrument._activation import launcher
from slime_instrument._activation.launcher import launch
from slime_instrument._errors import InstrumentError, SettingsError

TRAIN = """
import json, os, sys
import slime.backends.megatron_utils.actor as actor
import slime_instrument
status = slime_instrument.status()
print(json.dumps({
    "pid": os.getpid(), "route": status.route, "argv": sys.argv[1:], "variable": os.environ["SLIME_INSTRUMENT"],
    "wrapped": hasattr(actor.MegatronTrainRayActor.train_actor, "__wrapped__"),
}))
sys.exit(7)
"""
RUN = "from slime_instrument._activation.launcher import launch; import sys; launch(sys.argv[1:])"


@pytest.fixture
def train_py(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    return script


def test_run_replaces_itself_by_the_armed_command(installed: Any, fake_slime: Path, train_py: Path) -> None:
    done = installed.run(
        "-c", RUN, installed.python, train_py, "--lr", "1e-6", path=[fake_slime], check=False, SLIME_INSTRUMENT="0"
    )
    shown = json.loads(done.stdout)
    assert done.returncode == 7, "the exit status is the command's own"
    assert shown["route"] == "slime-instrument run"
    assert shown["argv"] == ["--lr", "1e-6"]
    assert shown["variable"] == "1", "asking to run armed wins over what was in the environment"
    assert shown["wrapped"] is True


def test_run_keeps_the_process(installed: Any, fake_slime: Path, train_py: Path, tmp_path: Path) -> None:
    code = f"import os; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); " + RUN
    done = installed.run("-c", code, installed.python, train_py, path=[fake_slime], check=False)
    assert json.loads(done.stdout)["pid"] == int((tmp_path / "pid").read_text())


def test_run_says_in_one_line_on_stderr_what_will_be_patched(installed: Any, fake_slime: Path, train_py: Path) -> None:
    done = installed.run("-c", RUN, installed.python, train_py, path=[fake_slime], check=False)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"slime_instrument: armed `{installed.python} {train_py}`")
    for name in ("data-loader", "log-probs", "train-actor", "train-dump", "ray-environment"):
        assert name in line


def test_run_says_when_the_start_files_are_missing(uninstalled: Any, fake_slime: Path, train_py: Path) -> None:
    done = uninstalled.run("-c", RUN, uninstalled.python, train_py, path=[fake_slime], check=False)
    _, warning = done.stderr.splitlines()
    assert "slime_instrument.pth is not in the site-packages" in warning
    assert "sitecustomize_example" in warning


def test_the_command_line_reaches_the_launcher(installed: Any, fake_slime: Path, train_py: Path) -> None:
    done = installed.run(
        "-c", "from slime_instrument._cli.app import main; main()", "run", "--", installed.python, train_py, "--json",
        path=[fake_slime], check=False,
    )  # fmt: skip
    assert done.returncode == 7
    assert json.loads(done.stdout)["argv"] == ["--json"]


def test_a_missing_command_is_an_error_in_five_parts() -> None:
    with pytest.raises(InstrumentError) as caught:
        launch(["no-such-program-anywhere", "train.py"])
    assert str(caught.value) == (
        "slime_instrument: slime-instrument run: expected a command that can be executed, found "
        "'no-such-program-anywhere'. Nothing was started. Check the name and PATH; a Python file needs an interpreter "
        "in front: slime-instrument run -- python FILE"
    )


def test_no_command_at_all_is_refused() -> None:
    with pytest.raises(InstrumentError, match="expected a command, found none"):
        launch([])


def test_a_file_that_the_system_cannot_execute_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "broken"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(InstrumentError, match="first line"):
        launch([str(script)])


def test_a_bad_setting_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_INSTRUMENT_EVERY", "often")
    monkeypatch.setattr(os, "execvpe", lambda *_: pytest.fail("started all the same"))
    with pytest.raises(SettingsError, match="SLIME_INSTRUMENT_EVERY"):
        launch([sys.executable, "-c", "pass"])


def test_the_announcement_names_every_declared_patch() -> None:
    from slime_instrument._hooks import HOOKS

    line = launcher.announcement(["python", "my train.py"])
    assert "`python 'my train.py'`" in line
    assert "\n" not in line
    assert all(patch.name in line for patch in HOOKS)
