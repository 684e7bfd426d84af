"""A slime that has changed under us: training goes on untouched, and what no longer fits says what it misses."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._activation.check import check
from slime_instrument._format.schema import PROVENANCE
from slime_instrument.lab import LabOptions, LabResult, train
from tools.matrix.agreement import check_agrees
from tools.matrix.plan import LAST_WITHOUT, Cell
from tools.matrix.runs import Runs, weights_digest

pytestmark = pytest.mark.real_slime

MEGATRON = "slime/backends/megatron_utils"


@dataclass(frozen=True)
class Change:
    """``edits``: file -> pattern -> replacement. ``culprit`` is the patch that no longer fits, ``reason`` in words."""

    edits: dict[str, dict[str, str]]
    culprit: str
    reason: str
    step_back: tuple[str, ...]
    dump_name: str | None = None


CHANGES = {
    "a renamed parameter of the micro-batch iterator": Change(
        {f"{MEGATRON}/data.py": {r"(def get_next\(self, )keys(:[^\n]*\n)": r"\1wanted\2        keys = wanted\n"}},
        "micro-batches",
        "takes (self, wanted); expected also keys",
        ("policy-loss", "log-probs"),
    ),
    "a renamed dump function": Change(
        {
            "slime/utils/train_dump_utils.py": {"def save_debug_train_data": "def write_debug_train_data"},
            f"{MEGATRON}/actor.py": {r"\.save_debug_train_data\(self": ".write_debug_train_data(self"},
        },
        "train-dump",
        "slime.utils.train_dump_utils has no save_debug_train_data",
        ("data-loader", "train-actor", "optimizer-step", "micro-batches", "policy-loss", "log-probs"),
        dump_name="{rollout_id}_{rank}.pt",  # for slime's own files: one name for all ranks would be written at once
    ),
    "a renamed data loader": Change(
        {
            "slime/utils/data.py": {r"def process_rollout_data\(": "def load_rollout_data("},
            f"{MEGATRON}/actor.py": {"process_rollout_data": "load_rollout_data"},
        },
        "data-loader",
        "slime.utils.data has no process_rollout_data",
        (),
    ),
}


@dataclass(frozen=True)
class Changed:
    change: Change
    checkout: Path
    result: LabResult

    @property
    def states(self) -> dict[str, str]:
        return {patch["name"]: patch["state"] for patch in self.result.patches}


@pytest.fixture(scope="module", params=CHANGES)
def changed(
    request: pytest.FixtureRequest, sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Changed:
    change = CHANGES[request.param]
    checkout = tmp_path_factory.mktemp("checkout") / "slime-copy"
    shutil.copytree(sources[LAST_WITHOUT] / "slime", checkout / "slime")
    for name, edits in change.edits.items():
        path = checkout / name
        text = path.read_text()
        for pattern, replacement in edits.items():
            text, count = _renamed(text, pattern, replacement)
            assert count, f"{pattern} is not in {name}"
        path.write_text(text)
    out = tmp_path_factory.mktemp("out")
    options = LabOptions(out=out, slime=checkout, dp=2, cp=2, save_weights=True, dump_name=change.dump_name)
    return Changed(change, checkout, train(options))


def _renamed(text: str, pattern: str, replacement: str) -> tuple[str, int]:
    """Replace until the pattern, which finds one use of a name inside a function, finds no more."""
    total = 0
    while True:
        text, count = re.subn(pattern, replacement, text, flags=re.DOTALL)
        total += count
        if not count:
            return text, total


def test_training_is_the_same_bit_for_bit(changed: Changed, runs: Runs) -> None:
    cell = Cell(LAST_WITHOUT, "DP2-CP2", "grpo", "default")
    runs.make([cell.plain])
    plain = runs.get(cell.plain)
    assert plain is not None
    assert {path.stem: weights_digest(path) for path in changed.result.weights} == plain.weights


def test_the_reason_names_what_is_missing(changed: Changed) -> None:
    patches = {patch["name"]: patch for patch in changed.result.patches}
    culprit = patches[changed.change.culprit]
    assert culprit["state"] == "INCOMPATIBLE"
    assert changed.change.reason in culprit["reason"]


def test_what_belongs_together_steps_back_together(changed: Changed) -> None:
    stepped_back = {patch["name"] for patch in changed.result.patches if "not applied without" in patch["reason"]}
    assert stepped_back == set(changed.change.step_back)
    assert {changed.states[name] for name in stepped_back} <= {"SKIPPED"}


def test_check_says_the_same_without_training(changed: Changed) -> None:
    probed = [patch.as_dict() for patch in check(changed.checkout).patches]
    assert list(check_agrees(probed, changed.result.patches)) == []


def test_no_dump_is_half_a_dump(changed: Changed) -> None:
    names = [path.name for path in changed.result.train_dumps]
    WHAT_IS_LEFT[changed.change.culprit](changed, names)


def _without_log_probs(changed: Changed, names: list[str]) -> None:
    """Nothing captured at all, and the file says why."""
    assert names == ["0.pt"]
    payload: dict[str, Any] = torch.load(changed.result.train_dumps[0], weights_only=True)
    assert not any("log_probs" in sample for sample in payload["samples"])
    assert all("micro-batches is INCOMPATIBLE" in s[PROVENANCE]["log_probs"] for s in payload["dp_shards"])


def _slimes_own(changed: Changed, names: list[str]) -> None:
    """Slime's own dump function ran, once on every rank, with nothing of ours in what it wrote."""
    assert names == [f"0_{rank}.pt" for rank in range(4)]
    for path in changed.result.train_dumps:
        payload = torch.load(path, weights_only=True)
        assert set(payload) == {"rollout_id", "rank", "rollout_data"}
        assert "log_probs" not in payload["rollout_data"]
        assert not {name for name in payload["rollout_data"] if "slime_instrument" in name}


def _by_index(changed: Changed, names: list[str]) -> None:
    """All samples with all values, in the order of their index, and the file says that positions are unknown."""
    assert names == ["0.pt"]
    payload = torch.load(changed.result.train_dumps[0], weights_only=True)
    assert [sample["sample_index"] for sample in payload["samples"]] == list(range(8))
    assert all(torch.isfinite(sample["log_probs"]).all() for sample in payload["samples"])
    assert not any("rollout_position" in sample for sample in payload["samples"])
    assert [shard[PROVENANCE]["positions"] for shard in payload["dp_shards"]] == ["unknown"] * 2


WHAT_IS_LEFT: dict[str, Callable[[Changed, list[str]], None]] = {
    "micro-batches": _without_log_probs,
    "train-dump": _slimes_own,
    "data-loader": _by_index,
}
