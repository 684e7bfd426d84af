"""Real gloo ranks: without Megatron's Gloo groups, after groups were destroyed and rebuilt, and with a pending file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def dumps_of(scenario: str, folder: Path, **settings: str) -> list[dict[str, Any]]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLIME_INSTRUMENT")}
    environment = {**clean, **settings, "PYTHONPATH": str(ROOT), "SLIME_INSTRUMENT_STRICT": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("group_changes.py")), scenario, str(folder)],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [torch.load(file, weights_only=True) for file in sorted(folder.glob("*.pt"))]


def assert_same_samples(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert len(one["samples"]) == len(other["samples"]) == 10
    for first, second in zip(one["samples"], other["samples"], strict=True):
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert torch.equal(value, second[key]) if torch.is_tensor(value) else value == second[key]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (dump,) = dumps_of("plain", tmp_path_factory.mktemp("plain"))
    return dump


def test_without_gloo_groups_the_training_groups_carry_the_dump(plain: dict[str, Any], tmp_path: Path) -> None:
    (dump,) = dumps_of("no-gloo", tmp_path)
    assert_same_samples(dump, plain)


@pytest.mark.parametrize(("scenario", "dumps"), [("subgroups", 2), ("world", 3)])
def test_groups_that_were_destroyed_and_rebuilt_carry_the_next_dump(
    scenario: str, dumps: int, plain: dict[str, Any], tmp_path: Path
) -> None:
    found = dumps_of(scenario, tmp_path)
    assert [dump["rollout_id"] for dump in found] == list(range(dumps))
    for dump in found:
        assert_same_samples(dump, plain)


def test_asynchronous_writing_leaves_the_same_files_and_rotates_them(plain: dict[str, Any], tmp_path: Path) -> None:
    found = dumps_of("world", tmp_path, SLIME_INSTRUMENT_ASYNC_WRITE="1", SLIME_INSTRUMENT_KEEP_LAST="2")
    assert [dump["rollout_id"] for dump in found] == [1, 2]
    for dump in found:
        assert_same_samples(dump, plain)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.pt", "2.pt"]
