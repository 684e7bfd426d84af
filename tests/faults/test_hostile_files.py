"""Hostile, cut, empty and foreign files on the command line: exit status 2, one line, no traceback."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slime_instrument._cli.app import main
from tests.fuzz.read_dumps import make_corpus


class Runs:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    corpus = make_corpus(tmp_path / "corpus")
    good = next(path for path in corpus if path.name == "v2").read_bytes()
    (tmp_path / "good.pt").write_bytes(good)
    (tmp_path / "cut.pt").write_bytes(good[: len(good) // 2])
    (tmp_path / "empty.pt").touch()
    (tmp_path / "text.pt").write_text("no dump")
    (tmp_path / "folder.pt").mkdir()
    os.mkfifo(tmp_path / "pipe.pt")
    torch.save({"rollout_id": 0, "samples": [{"metadata": Runs(tmp_path / "ran")}]}, tmp_path / "runs.pt")
    (tmp_path / "pickled.pt").write_bytes(pickle.dumps([Runs(tmp_path / "ran")]))
    return tmp_path


BAD = ["cut", "empty", "text", "folder", "pipe", "runs", "pickled", "missing"]


def in_a_process_of_its_own(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = "from slime_instrument._cli.app import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, timeout=60, env={**os.environ, "SLIME_INSTRUMENT": "0"},
        cwd=Path(__file__).parents[2],
    )  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_dump_is_one_line_and_status_2_and_nothing_in_it_runs(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["inspect", str(folder / f"{name}.pt")])
    assert caught.value.code == 2
    done = capsys.readouterr()
    assert done.out == ""
    lines = done.err.strip().splitlines()
    assert len(lines) == 1, done.err
    assert f"{name}.pt" in lines[0]
    assert not (folder / "ran").exists()


def test_the_other_files_of_the_same_call_are_still_looked_at(folder: Path) -> None:
    files = [folder / f"{name}.pt" for name in (*BAD[:4], "good", *BAD[4:])]
    done = in_a_process_of_its_own("validate", "--json", *files)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    unreadable = {Path(error["file"]).stem for error in report["errors"] if error["code"] == "unreadable"}
    assert unreadable == set(BAD)
    assert [error for error in report["errors"] if error["file"].endswith("good.pt")] == []
    assert not (folder / "ran").exists()
