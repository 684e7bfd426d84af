"""Real slime, real TensorBoard event files, real wandb in offline mode."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_instrument.lab import LabOptions, find_sources, train

pytestmark = pytest.mark.real_slime

_HOOK = f"{Path(__file__).with_name('real_tracking.py')}:use_real_trackers"


@pytest.fixture
def checkout() -> Callable[[str], Path]:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: install slime-instrument[lab]")

    def find(name: str) -> Path:
        # A checkout of main may have its commit behind its name.
        found = next((source for source in find_sources() if re.fullmatch(f"{name}(-.*)?", source.name)), None)
        if found is None:
            pytest.skip(f"no slime checkout named {name} in $SLIME_SOURCES or ~/.cache/slime-instrument/sources")
        return found

    return find


def run(out: Path, slime: Path, *, layout: dict[str, int], wandb: bool = True) -> Any:
    overrides = {
        "use_tensorboard": True,
        "tb_project_name": "project",
        "tb_experiment_name": "experiment",
        "wandb_always_use_train_step": False,
    }
    if wandb:
        overrides |= {
            "use_wandb": True,
            "wandb_mode": "offline",
            "wandb_project": "project",
            "wandb_group": "group",
            "wandb_run_id": "abc12345",
            "wandb_dir": str(out / "wandb"),
            "wandb_random_suffix": False,
        }
    environment = {
        "SLIME_INSTRUMENT_METRICS": "1",
        "SLIME_INSTRUMENT_ALERT": "abs_diff.mean>0.0001",
        "TENSORBOARD_DIR": str(out / "tensorboard"),
        "WANDB_SILENT": "true",
    }
    return train(
        LabOptions(
            out=out, slime=slime, rollouts=2, overrides=overrides, environment=environment, rank_hook=_HOOK, **layout
        )
    )


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, float]]] = {}
    for file in folder.iterdir():
        events = EventAccumulator(str(file))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, []).extend((event.step, event.value) for event in events.Scalars(tag))
    return found


@pytest.mark.parametrize(
    ("tag", "layout"),
    [
        ("v0.2.2", {"dp": 2}),
        pytest.param("681b3adca~1", {"cp": 2, "dp": 2}, marks=pytest.mark.full),
        pytest.param("681b3adca~1", {"pp": 2, "tp": 2}, marks=pytest.mark.full),
        ("main", {"cp": 2}),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of the TensorBoard reader, about protobuf
def test_the_metrics_stand_in_slimes_own_trackers_and_in_the_file(
    checkout: Callable[[str], Path], tmp_path: Path, tag: str, layout: dict[str, int]
) -> None:
    """The writer is the rank where slime starts its trackers, in every layout: the values arrive, each once."""
    run(tmp_path, checkout(tag), layout=layout)
    lines = [json.loads(line) for line in (tmp_path / "train_data" / "metrics.jsonl").read_text().splitlines()]
    assert [line["rollout_id"] for line in lines] == [0, 1]
    assert [line["not_tracked"] for line in lines] == [None, None]
    logged = scalars(tmp_path / "tensorboard")
    assert "rollout/log_probs" in logged or "rollout/raw_reward" in logged  # slime's own are beside ours
    for name in ("abs_diff.mean", "k3", "ess"):
        values = logged[f"instrument/{name}"]
        assert [step for step, _ in values] == [0, 1]
        for line, (_, value) in zip(lines, values, strict=True):
            stated: Any = line
            for part in name.split("."):
                stated = stated[part]
            assert math.isclose(value, stated, rel_tol=1e-5)
    assert lines[0]["n_tokens"] > 0
    assert lines[0]["alerts"] == ["abs_diff.mean>0.0001"]
    log = (tmp_path / "lab.log").read_text()
    assert "rollout 0: alert abs_diff.mean>0.0001" in log
    assert f"slime-instrument report {tmp_path}/rollout_data/0.pt {tmp_path}/train_data/0.pt" in log
    history = list((tmp_path / "wandb").rglob("*.wandb"))
    assert history
    assert any(b"instrument/abs_diff.mean" in file.read_bytes() for file in history)
