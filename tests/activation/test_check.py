"""``check``: what it refuses to look at, each with exit status 2 and a message that says what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slime_instrument._activation.check import check
from slime_instrument.lab._sources import MINIATURE

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = "from slime_instrument._cli.app import main; main()"


def ask(*arguments: str, path: tuple[Path, ...] = (), folder: Path = REPOSITORY) -> subprocess.CompletedProcess[str]:
    places = os.pathsep.join(map(str, (REPOSITORY, *path)))
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, "check", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": places, "COLUMNS": "1000"},
    )


def slime_in(folder: Path, loss: str = "") -> Path:
    package = folder / "slime" / "backends" / "megatron_utils"
    package.mkdir(parents=True)
    (folder / "slime" / "__init__.py").touch()
    (package / "loss.py").write_text(loss)
    return folder


def refused(answer: subprocess.CompletedProcess[str], *words: str) -> None:
    assert answer.returncode == 2, answer.stderr
    assert answer.stdout == ""
    assert "Traceback" not in answer.stderr
    for text in ("slime_instrument: ", "expected ", "found ", "Nothing was probed.", *words):
        assert text in answer.stderr, answer.stderr


def test_a_folder_that_is_no_slime_is_refused(tmp_path: Path) -> None:
    (tmp_path / "slime").mkdir()
    refused(ask("--slime", str(tmp_path)), str(tmp_path), "no slime package in it", "Give the folder that holds")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    refused(ask("--slime", str(tmp_path / "nowhere")), "no such folder")


def test_a_checkout_that_cannot_be_parsed_is_refused(tmp_path: Path) -> None:
    refused(ask("--slime", str(slime_in(tmp_path, "def broken(:\n"))), "a slime that can be read", "loss.py")


def test_a_checkout_that_is_no_text_is_refused(tmp_path: Path) -> None:
    checkout = slime_in(tmp_path)
    (checkout / "slime" / "backends" / "megatron_utils" / "loss.py").write_bytes(b"x = '\xff\xfe\x00'\n")
    refused(ask("--slime", str(checkout)), "a slime that can be read")


def test_a_checkout_without_the_megatron_backend_is_refused(tmp_path: Path) -> None:
    checkout = slime_in(tmp_path)
    (checkout / "slime" / "backends" / "megatron_utils" / "loss.py").unlink()
    refused(ask("--slime", str(checkout)), "slime's Megatron backend", "a complete checkout")


def test_two_slimes_on_the_path_are_refused_and_both_named(tmp_path: Path) -> None:
    one, other = slime_in(tmp_path / "one"), slime_in(tmp_path / "other")
    refused(ask(path=(one, other), folder=tmp_path), "one slime on Python's path", str(one), str(other), "--slime DIR")


def test_one_slime_on_the_path_is_probed(tmp_path: Path) -> None:
    answer = ask("--json", path=(slime_in(tmp_path / "one"),), folder=tmp_path)
    assert answer.returncode == 1, "an empty slime is one that no patch fits"
    assert str(tmp_path / "one") in answer.stdout


def test_the_miniature_fits_and_the_slime_folder_itself_may_be_named() -> None:
    for folder in (MINIATURE, MINIATURE / "slime"):
        result = check(folder)
        assert result.dumps_written
        assert result.verdict == "Train dumps will be written; slime_instrument captures the log-probs."
        assert not result.native_dump
        assert result.path == MINIATURE


def test_a_misfit_is_named_and_its_companions_step_back(tmp_path: Path) -> None:
    shutil.copytree(MINIATURE / "slime", tmp_path / "slime")
    loss = tmp_path / "slime" / "backends" / "megatron_utils" / "loss.py"
    loss.write_text(loss.read_text().replace("def policy_loss_function", "def policy_loss"))
    patches = {patch.name: patch for patch in check(tmp_path).patches}
    assert patches["policy-loss"].state == "INCOMPATIBLE"
    assert "slime.backends.megatron_utils.loss has no policy_loss_function" in patches["policy-loss"].reason
    assert patches["log-probs"].state == patches["micro-batches"].state == "SKIPPED"
    assert patches["train-dump"].state == "PENDING"
    result = check(tmp_path)
    assert result.dumps_written, "with everything but log-probs"
    assert "without log-probs where slime computes none, because policy-loss does not fit" in result.verdict


def test_without_the_dump_function_no_dump_will_be_written_and_the_first_line_says_so(tmp_path: Path) -> None:
    shutil.copytree(MINIATURE / "slime", tmp_path / "slime")
    for path in (tmp_path / "slime").rglob("*.py"):
        path.write_text(path.read_text().replace("save_debug_train_data(", "write_debug_train_data("))
    answer = ask("--slime", str(tmp_path))
    assert answer.returncode == 1
    first = "No v2 train dump will be written: train-dump does not fit; slime's per-rank files remain."
    assert answer.stdout.splitlines()[0] == first


def test_slime_source_is_what_is_checked_where_no_folder_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_SOURCE", str(MINIATURE))
    answer = ask()
    assert answer.returncode == 0
    assert str(MINIATURE) in answer.stdout
    assert max(map(len, answer.stdout.splitlines())) <= 120
    names = {line.split()[1] for line in answer.stdout.splitlines()[2:] if not line.startswith(" ")}
    assert {"train-dump", "policy-loss", "data-loader"} <= names
