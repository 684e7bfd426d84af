"""Usage errors, help and start-up."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.format import builders

from .outcomes import strict


@pytest.mark.parametrize(
    "arguments", [["inspect"], ["validate"], ["nonsense"], ["demo"], ["run"], ["inspect", "a.pt", "--sample", "x"]]
)
def test_wrong_usage_is_exit_2_on_stderr(call: Any, arguments: list[str]) -> None:
    outcome = call(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err


@pytest.mark.parametrize(
    "command",
    ["status", "check", "run", "demo", "inspect", "validate", "compare", "report", "view", "export", "convert"],
)
def test_help_of_every_command_has_an_example(call: Any, command: str) -> None:
    outcome = call(command, "--help")
    assert outcome.code == 0
    assert re.search("Examples?: *slime-instrument|Examples?: *SLIME_INSTRUMENT", outcome.out)


def test_the_version_is_printed(call: Any) -> None:
    from slime_instrument import __version__

    assert call("--version").out == f"slime-instrument {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from slime_instrument._cli.app import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'wrapt', 'megatron', 'polars', 'ray'} & set(sys.modules)), file=sys.stderr)\n"
    )
    environment = {**os.environ, "SLIME_INSTRUMENT": "0"}
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stderr == "[]\n"
    assert time.monotonic() - began < 10


def test_a_reader_that_goes_away_ends_a_command_as_it_ends_other_tools(tmp_path: Path) -> None:
    train = builders.save(builders.v2(), tmp_path / "7.pt")
    command = [sys.executable, "-c", "from slime_instrument._cli.app import main; main()", "inspect", str(train)]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("command", "found"),
    [
        (("export", "{dump}", "-o", "x.csv"), ".csv"),
        (("export", "{dump}", "-o", "none/x.parquet"), "no folder"),
        (("report", "{dump}", "-o", "none/x.html"), "no folder"),
        (("extract", "{dump}", "--samples", "0", "-o", "none/x.pt"), "no folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_and_no_folder_is_made(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], found: str
) -> None:
    monkeypatch.chdir(tmp_path)
    dump = builders.save(builders.v2(), tmp_path / "7.pt")
    outcome = call(*(part.format(dump=dump) for part in command))
    assert outcome.code == 2
    assert f"-o {command[-1]}: expected" in outcome.err
    assert found in outcome.err
    assert sorted(tmp_path.iterdir()) == [dump]


def test_a_bad_setting_is_exit_1_of_status(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_INSTRUMENT_EVERY", "two")
    outcome = call("status")
    assert outcome.code == 1
    assert "SLIME_INSTRUMENT_EVERY: expected a whole number above 0, found 'two'" in outcome.err


def test_inspect_and_extract_take_a_folder(call: Any, tmp_path: Path) -> None:
    payload = builders.v2()
    builders.save(payload, tmp_path / "train_data" / "7.pt")
    builders.save(builders.rollout(payload), tmp_path / "rollout_data" / "7.pt")
    (tmp_path / "train_data" / "8.pt").write_bytes(b"cut")
    outcome = call("inspect", tmp_path, "--json")
    assert [one["kind"] for one in strict(outcome.out)["files"]] == ["rollout", "train-v2"]
    assert outcome.code == 2
    assert "8.pt" in outcome.err
    assert call("extract", tmp_path, "--worst", "1", "-o", tmp_path / "mini.pt").code == 0
    (tmp_path / "train_data" / "7.pt").unlink()
    outcome = call("extract", tmp_path, "--worst", "1", "-o", tmp_path / "mini.pt")
    assert outcome.code == 2
    assert "expected the dumps of one rollout, found no pair of dumps" in outcome.err


def test_export_leaves_out_what_cannot_be_read_and_says_so(call: Any, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars")
    for name in ("5.pt", "7.pt"):
        builders.save(builders.v2(), tmp_path / "dumps" / name)
    for name in ("4.pt", "6.pt", "8.pt"):
        (tmp_path / "dumps" / name).write_bytes(b"cut")
    out = tmp_path / "all.parquet"
    outcome = call("export", tmp_path / "dumps", "-o", out)
    assert outcome.code == 2
    assert [name in outcome.err for name in ("4.pt", "6.pt", "8.pt")] == [True] * 3
    assert len(polars.read_parquet(out)) == 8
    out.unlink()
    for name in ("5.pt", "7.pt"):
        (tmp_path / "dumps" / name).unlink()
    assert call("export", tmp_path / "dumps", "-o", out).code == 2
    assert not out.exists()


def test_an_older_wrapt_in_front_on_the_path_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "wrapt").mkdir()
    (tmp_path / "wrapt" / "__init__.py").write_text('__version__ = "1.17.3"\nclass ObjectProxy: pass\n')
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    for command in ("status", "check"):
        line = f"from slime_instrument._cli.app import main; main([{command!r}])"
        done = subprocess.run([sys.executable, "-c", line], env=environment, capture_output=True, text=True)
        assert done.returncode == 2
        (said,) = done.stderr.splitlines()
        assert f"expected 2.5.2 or later, found 1.17.3 in {tmp_path / 'wrapt'}" in said
