"""slime destroys the WORLD process group while the engines have the GPUs, and makes it again: dumps are as ever.

On a CPU slime leaves WORLD alone, because it has no accelerator's backend. Here slime is told that gloo is one, and its
own functions for sleeping and waking run around each rollout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime_instrument._format.schema import PROVENANCE
from slime_instrument.lab import LabOptions, LabResult, find_sources, train
from tools.matrix.compare import differences
from tools.matrix.runs import weights_digest

pytestmark = pytest.mark.real_slime

HOOK = """
import torch.distributed as dist
from slime.utils import accelerator, reloadable_process_group as groups

def sleep_between_rollouts(rank, actor_module, args):
    accelerator.is_accelerator_backend = lambda backend: True
    actor = actor_module.MegatronTrainRayActor
    train = actor.train

    def awake(self, *rest, **more):
        before = dist.group.WORLD
        groups.destroy_process_groups()
        asleep = dist.group.WORLD
        groups.reload_process_groups()
        assert len({before, asleep, dist.group.WORLD}) == 3, "slime left WORLD alone"
        return train(self, *rest, **more)

    actor.train = awake
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LabResult]:
    source = next((each for each in find_sources() if each.name == "main"), None)
    if source is None or not (source / "slime" / "utils" / "reloadable_process_group.py").is_file():
        pytest.skip("no slime checkout named main")
    if "register_default_process_group" not in (source / "slime/utils/reloadable_process_group.py").read_text():
        pytest.skip("this slime does not destroy WORLD")
    folder = tmp_path_factory.mktemp("world")
    (folder / "hook.py").write_text(HOOK)
    hooks = {"kept": None, "rebuilt": f"{folder / 'hook.py'}:sleep_between_rollouts"}
    return {
        name: train(
            LabOptions(out=folder / name, slime=source, dp=2, cp=2, rollouts=3, save_weights=True, rank_hook=hook)
        )
        for name, hook in hooks.items()
    }


def _dumps(result: LabResult) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [torch.load(path, weights_only=True) for path in result.train_dumps]
    for dump in found:
        for shard in dump["dp_shards"]:
            shard.pop(PROVENANCE)  # only ours has it
    return found


def test_every_rollout_has_its_dump_and_it_is_that_of_a_world_that_was_kept(results: dict[str, LabResult]) -> None:
    kept, rebuilt = results["kept"], results["rebuilt"]
    assert [path.name for path in rebuilt.train_dumps] == ["0.pt", "1.pt", "2.pt"]
    assert list(differences(_dumps(rebuilt), _dumps(kept))) == []
    assert not [patch for patch in rebuilt.patches if patch["failures"]]


def test_training_is_the_same_bit_for_bit(results: dict[str, LabResult]) -> None:
    digests = [[weights_digest(path) for path in result.weights] for result in results.values()]
    assert len(digests[0]) == 4
    assert digests[0] == digests[1]
