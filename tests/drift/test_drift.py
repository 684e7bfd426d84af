"""What upstream could do to the places where the hooks work: the dump is right, or steps back with the reason.

Never a wrong file, and training is the same bit for bit. ``tools/matrix/drift.py`` has the variants.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._activation.check import check
from slime_instrument._format.schema import PROVENANCE
from slime_instrument._validate import validate_files
from slime_instrument.lab import LabOptions, LabResult, find_sources, train
from tools.matrix.agreement import check_agrees
from tools.matrix.compare import differences
from tools.matrix.drift import VARIANTS, Outcome, Variant
from tools.matrix.runs import weights_digest

pytestmark = pytest.mark.real_slime


@dataclass(frozen=True)
class Trained:
    variant: Variant
    checkout: Path
    result: LabResult
    unchanged: LabResult


@pytest.fixture(scope="session")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LabResult]:
    """What each release as it is leaves behind; filled as it is asked for."""
    return {}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(variant, id=variant.key, marks=() if variant.quick else pytest.mark.full) for variant in VARIANTS
    ],
)
def trained(
    request: pytest.FixtureRequest, unchanged: dict[str, LabResult], tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    variant: Variant = request.param
    source = next((each for each in find_sources() if each.name == variant.release), None)
    if source is None:
        pytest.skip(f"no slime checkout named {variant.release}")
    if variant.release not in unchanged:
        unchanged[variant.release] = _train(source, tmp_path_factory.mktemp("unchanged"))
    checkout = variant.make(source, tmp_path_factory.mktemp("checkout"))
    names = "{rollout_id}_{rank}.pt" if variant.outcome is Outcome.PER_RANK else None
    result = _train(checkout, tmp_path_factory.mktemp("out"), names)
    return Trained(variant, checkout, result, unchanged[variant.release])


def _train(slime: Path, out: Path, names: str | None = None) -> LabResult:
    return train(LabOptions(out=out, slime=slime, dp=2, cp=2, save_weights=True, dump_name=names))


def test_a_changed_slime_trains_as_before_and_its_dump_is_right_or_steps_back(trained: Trained) -> None:
    result, before = trained.result, trained.unchanged
    assert [weights_digest(path) for path in result.weights] == [weights_digest(path) for path in before.weights]
    patches = {patch["name"]: patch for patch in result.patches}
    misfits = {name for name, patch in patches.items() if patch["state"] == "INCOMPATIBLE"}
    assert misfits == {name for name, _ in trained.variant.misfits}
    for name, reason in trained.variant.misfits:
        assert reason in patches[name]["reason"]
    assert not [patch for patch in result.patches if patch["failures"] or patch["state"] in ("FAILED", "DRIFTED")]
    _LOOK[trained.variant.outcome](trained)


def test_check_says_beforehand_what_came_of_it(trained: Trained) -> None:
    probed = check(trained.checkout)
    live = [dict(patch) for patch in trained.result.patches]
    assert list(check_agrees([patch.as_dict() for patch in probed.patches], live)) == []
    outcome = trained.variant.outcome
    assert probed.dumps_written == (outcome is not Outcome.PER_RANK)
    assert ("without log-probs" in probed.verdict) == (outcome is Outcome.NO_LOG_PROBS)
    assert ("by slime itself" in probed.verdict) == (outcome is Outcome.NATIVE)


def _ours(trained: Trained) -> None:
    assert list(differences(_content(trained.result), _content(trained.unchanged))) == []
    _valid(trained.result)
    for shard in _dump(trained.result)["dp_shards"]:
        assert shard[PROVENANCE]["positions"] == "partition"
        assert shard[PROVENANCE]["fields"]["log_probs"] == "captured"


def _by_index(trained: Trained) -> None:
    dump, before = _content(trained.result), _content(trained.unchanged)
    before["samples"].sort(key=lambda sample: sample["sample_index"])
    for sample in before["samples"]:
        del sample["rollout_position"]
    for shard in (*before["dp_shards"], *dump["dp_shards"]):
        shard.pop("partition", None)
    assert list(differences(dump, before)) == []
    _valid(trained.result)
    assert {shard[PROVENANCE]["positions"] for shard in _dump(trained.result)["dp_shards"]} == {"unknown"}


def _no_log_probs(trained: Trained) -> None:
    before = _content(trained.unchanged)
    for sample in before["samples"]:
        del sample["log_probs"]
    assert list(differences(_content(trained.result), before)) == []
    _valid(trained.result)
    ((name, _),) = trained.variant.misfits
    for shard in _dump(trained.result)["dp_shards"]:
        assert f"{name} is INCOMPATIBLE" in shard[PROVENANCE]["log_probs"]


def _native(trained: Trained) -> None:
    """slime's own function wrote the file: nothing of ours is in it."""
    dump = _dump(trained.result)
    assert not any(PROVENANCE in shard for shard in dump["dp_shards"])
    assert list(differences(dump, _content(trained.unchanged))) == []
    _valid(trained.result)


def _per_rank(trained: Trained) -> None:
    assert [path.name for path in trained.result.train_dumps] == [f"0_{rank}.pt" for rank in range(4)]
    for path in trained.result.train_dumps:
        dump = torch.load(path, weights_only=True)
        assert set(dump) == {"rollout_id", "rank", "rollout_data"}
        assert not {name for name in dump["rollout_data"] if "slime_instrument" in name or name == "partition"}


_LOOK = {
    Outcome.OURS: _ours,
    Outcome.BY_INDEX: _by_index,
    Outcome.NO_LOG_PROBS: _no_log_probs,
    Outcome.NATIVE: _native,
    Outcome.PER_RANK: _per_rank,
}


def _dump(result: LabResult) -> dict[str, Any]:
    (path,) = result.train_dumps
    dump: dict[str, Any] = torch.load(path, weights_only=True)
    return dump


def _content(result: LabResult) -> dict[str, Any]:
    """The dump without what is ours alone."""
    dump = _dump(result)
    for shard in dump["dp_shards"]:
        shard.pop(PROVENANCE, None)
    return dump


def _valid(result: LabResult) -> None:
    found = validate_files(result.train_dumps, rollout=result.rollout_dumps[0])
    assert [problem.code for problem in found.errors] == []
