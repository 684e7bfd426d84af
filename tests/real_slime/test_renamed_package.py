"""A fork whose package has another name: with ``SLIME_INSTRUMENT_PACKAGE`` it is patched as slime is."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument.lab import LabOptions, LabResult, train
from tools.matrix.plan import LAST_WITHOUT, Cell
from tools.matrix.runs import Runs, weights_digest

pytestmark = pytest.mark.real_slime

NAMED = {"SLIME_INSTRUMENT_PACKAGE": "vime"}


@pytest.fixture(scope="module")
def fork(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """slime with every mention of its package renamed."""
    checkout = tmp_path_factory.mktemp("checkout") / "fork"
    shutil.copytree(sources[LAST_WITHOUT] / "slime", checkout / "vime")
    for path in (checkout / "vime").rglob("*.py"):
        path.write_text(re.sub(r"\bslime(?=\.\w)|(?<=import )slime\b", "vime", path.read_text()))
    return checkout


def check(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("slime-instrument")), "check", "--slime", str(folder), "--json"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_check_knows_it_by_its_name(fork: Path) -> None:
    outcome = check(fork, NAMED)
    assert outcome.returncode == 0, outcome.stderr
    record = json.loads(outcome.stdout)
    assert record["dumps_written"]
    assert {patch["target"].partition(".")[0] for patch in record["patches"]} == {"vime"}


def test_check_without_the_name_says_how_to_give_it(fork: Path) -> None:
    outcome = check(fork, {"SLIME_INSTRUMENT_PACKAGE": ""})
    assert outcome.returncode == 2
    assert "no slime package in it, but vime" in outcome.stderr
    assert "set SLIME_INSTRUMENT_PACKAGE=vime" in outcome.stderr


@pytest.fixture(scope="module")
def trained(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> LabResult:
    # The lab looks into its checkout under slime's name; the plug-in sees to it that nothing is imported as slime.
    (fork / "slime").symlink_to("vime")
    options = LabOptions(
        out=tmp_path_factory.mktemp("out"),
        slime=fork,
        dp=2,
        cp=2,
        save_weights=True,
        plugin=Path(__file__).with_name("follow_the_renamed_package.py"),
        environment=NAMED,
    )
    try:
        return train(options)
    finally:
        (fork / "slime").unlink()


def test_its_patches_are_active_under_its_name(trained: LabResult) -> None:
    targets = {patch["name"]: (patch["target"], patch["state"]) for patch in trained.patches}
    assert targets["train-dump"] == ("vime.utils.train_dump_utils.save_debug_train_data", "ACTIVE")
    assert {state for name, (_, state) in targets.items() if name not in ("ray-environment", "start")} == {"ACTIVE"}


def test_training_is_the_same_bit_for_bit_and_so_is_the_dump(trained: LabResult, runs: Runs) -> None:
    cell = Cell(LAST_WITHOUT, "DP2-CP2", "grpo", "default")
    runs.make([cell.plain, cell.subject])
    plain, armed = runs.get(cell.plain), runs.get(cell.subject)
    assert plain is not None
    assert armed is not None
    assert {path.stem: weights_digest(path) for path in trained.weights} == plain.weights
    ours, theirs = (samples(path) for path in (trained.train_dumps[0], armed.train_dumps[0]))
    assert len(ours) == len(theirs) == 8
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        assert "log_probs" in one
        for name, value in one.items():
            same = torch.equal(value, other[name]) if torch.is_tensor(value) else value == other[name]
            assert same, name


def samples(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = torch.load(path, weights_only=True)["samples"]
    return found
