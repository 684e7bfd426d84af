"""The miniature trains like slime does, layouts agree, and a broken layout is seen to be broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument.lab import LabError, LabOptions, LabResult, train

from . import shards

pytestmark = pytest.mark.lab

# With two optimizer steps, slime computes the old log-probs beforehand, so they are in the dump without our help.
OLD_LOG_PROBS: dict[str, Any] = {"steps": 2, "instrumented": False}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> LabResult:
    return train(LabOptions(out=tmp_path_factory.mktemp("single"), save_weights=True, **OLD_LOG_PROBS))


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> LabResult:
    return train(LabOptions(out=tmp_path_factory.mktemp("dp2cp2"), cp=2, dp=2, **OLD_LOG_PROBS))


def log_probs_of(result: LabResult) -> dict[tuple[int, ...], list[float]]:
    """Ranks run through context parallelism fastest here: TP is 1."""
    loaded = shards.load(result.train_dumps)
    cp, dp = result.layout["cp"], result.layout["dp"]
    merged = {}
    for rank in range(dp):
        merged.update(shards.whole(loaded[rank * cp : (rank + 1) * cp], "log_probs"))
    return merged


def test_uninstrumented_training_writes_one_old_dump_per_rank(single: LabResult, parallel: LabResult) -> None:
    assert [path.name for path in single.train_dumps] == ["0_0.pt"]
    assert [path.name for path in parallel.train_dumps] == ["0_0.pt", "0_1.pt", "0_2.pt", "0_3.pt"]
    for path in parallel.train_dumps:
        payload = torch.load(path, weights_only=True)
        assert set(payload) == {"rollout_id", "rank", "rollout_data"}
        assert "partition" not in payload["rollout_data"]
    assert parallel.target == "miniature"
    assert parallel.slime_version is None
    assert parallel.patches == []


def test_log_probs_of_dp2_cp2_agree_with_the_single_process(single: LabResult, parallel: LabResult) -> None:
    assert shards.largest_difference(log_probs_of(single), log_probs_of(parallel)) < 1e-5


def test_leaving_out_the_gather_over_context_parallel_ranks_is_noticed(single: LabResult, tmp_path: Path) -> None:
    plugin = tmp_path / "broken.py"
    plugin.write_text(
        "import torch\n"
        "from slime_instrument.lab._attention import PackedAttention\n"
        "PackedAttention.gather = lambda self, shard: torch.stack([shard] * self.cp_group.size())\n"
    )
    broken = train(LabOptions(out=tmp_path / "out", cp=2, dp=2, plugin=plugin, **OLD_LOG_PROBS))
    assert shards.largest_difference(log_probs_of(single), log_probs_of(broken)) > 0.1


def test_what_is_logged_is_what_slime_logs(parallel: LabResult) -> None:
    logged = {key for metrics in parallel.logged_metrics for key in metrics}
    assert {"rollout/log_probs", "rollout/advantages", "train/loss", "train/grad_norm"} <= logged
    assert "rollout/partition" not in logged


def test_weights_are_saved_under_their_global_names(single: LabResult) -> None:
    assert [path.name for path in single.weights] == ["0.pt"]
    names = torch.load(single.weights[0], weights_only=True)
    assert any(".layers.3." in name for name in names)


def test_tensor_and_pipeline_parallel_ranks_hold_one_sample_set(tmp_path: Path, single: LabResult) -> None:
    result = train(LabOptions(out=tmp_path, tp=2, pp=2, cp=2, **OLD_LOG_PROBS))
    loaded = shards.load(result.train_dumps)
    assert "log_probs" not in loaded[0], "only the last pipeline stage has log-probs"
    # Order of ranks: TP fastest, then CP, DP, PP. Rank 4 is the last stage's TP 0, CP 0; rank 6 its CP 1.
    assert shards.largest_difference(log_probs_of(single), shards.whole([loaded[4], loaded[6]], "log_probs")) < 1e-5


def test_a_failing_rank_ends_the_run_with_its_traceback(tmp_path: Path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text(
        "def fail(rank, actor_module, args):\n    if rank == 1:\n        raise ValueError('no such luck')\n"
    )
    with pytest.raises(LabError, match="no such luck") as caught:
        train(LabOptions(out=tmp_path / "out", dp=2, rank_hook=f"{hook}:fail", instrumented=False))
    assert next(iter(caught.value.tracebacks)) == 1


def test_a_hanging_rank_says_where_it_hangs(tmp_path: Path) -> None:
    hook = tmp_path / "hook.py"
    hook.write_text("import time\ndef hang(rank, actor_module, args):\n    time.sleep(60)\n")
    with pytest.raises(LabError, match="in hang"):
        train(LabOptions(out=tmp_path / "out", rank_hook=f"{hook}:hang", instrumented=False, timeout=3))


def test_a_layout_that_the_model_cannot_be_cut_into_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"tp=3.*Use one of 1, 2") as caught:
        train(LabOptions(out=tmp_path / "out", tp=3))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()
