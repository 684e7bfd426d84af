"""Whole runs in which something outside of us goes wrong: a rank without instrumentation, a module that is reloaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime_instrument.lab import LabOptions, train

pytestmark = pytest.mark.lab


def test_nobody_waits_for_a_rank_without_instrumentation(tmp_path: Path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text(
        "import slime_instrument\n"
        "def disarm(rank, actor_module, args):\n"
        "    if rank == 1:\n"
        "        slime_instrument.uninstrument()\n"
    )
    patience = 300.0  # a rank that waits makes the run miss its own deadline
    result = train(
        LabOptions(
            out=tmp_path / "out", dp=2, rollouts=2, rank_hook=f"{hook}:disarm", dump_name="{rollout_id}_{rank}.pt",
            environment={"SLIME_INSTRUMENT_TIMEOUT_S": str(patience)}, timeout=90.0,
        )
    )  # fmt: skip
    # Rank 1 writes what slime writes without us; rank 0, which would have written the whole, knows that it cannot.
    assert [path.name for path in result.train_dumps] == ["0_1.pt", "1_1.pt"]
    assert "format_version" not in torch.load(result.train_dumps[0], weights_only=True)
    assert {patch["name"]: patch["failures"] for patch in result.patches}["train-dump"] == 2


def test_a_reload_in_mid_run_shows_in_the_state_and_in_the_dump(tmp_path: Path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text(
        "import importlib, sys\n"
        "def reload_before_the_second(rank, actor_module, args):\n"
        "    real = actor_module.MegatronTrainRayActor.train\n"
        "    def train(self, rollout_id, *data, **more):\n"
        "        if rollout_id == 1:\n"
        "            importlib.reload(sys.modules['slime.backends.megatron_utils.loss'])\n"
        "        return real(self, rollout_id, *data, **more)\n"
        "    actor_module.MegatronTrainRayActor.train = train\n"
    )
    result = train(LabOptions(out=tmp_path / "out", rollouts=2, rank_hook=f"{hook}:reload_before_the_second"))
    first, second = (torch.load(path, weights_only=True) for path in result.train_dumps)
    assert "log_probs" in first["samples"][0]
    assert "log_probs" not in second["samples"][0]
    assert "policy-loss is DRIFTED" in second["dp_shards"][0]["provenance"]["log_probs"]
    states = {patch["name"]: patch["state"] for patch in result.patches}
    assert (states["policy-loss"], states["log-probs"]) == ("DRIFTED", "DRIFTED")
