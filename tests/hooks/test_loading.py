"""Positions survive loading, are worked out where they were never sent, and are claimed only when proven."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_instrument import _runtime as runtime
from slime_instrument._hooks.data_loader import WatchedRay

from .fake_slime import PLAIN, Form

Load = Callable[..., dict[str, Any]]


def loaded(slime: Any, args: SimpleNamespace, reference: Any, form: Form = PLAIN, **call: Any) -> Any:
    fake = slime(form)
    runtime.instrument()
    return fake.loader().process_rollout_data(args, reference, **({"dp_rank": 0, "dp_size": 1} | call))


def test_partition_is_back_in_what_the_loader_returns(slime: Any, args: Any, batch: Any) -> None:
    assert loaded(slime, args, [batch])["partition"] == [2, 0, 1]
    assert runtime.current().positions_from == "partition"


def test_each_rank_gets_its_own_partition(slime: Any, args: Any) -> None:
    shards = [
        {"partition": [2, 0], "total_lengths": [3, 4, 5, 6]},
        {"partition": [3, 1], "total_lengths": [3, 4, 5, 6]},
    ]
    assert loaded(slime, args, shards, dp_rank=1, dp_size=2) == {"partition": [3, 1], "total_lengths": [6, 4]}


def test_the_whole_call_may_use_keywords(slime: Any, args: Any, batch: Any) -> None:
    fake = slime()
    runtime.instrument()
    found = fake.loader().process_rollout_data(args=args, rollout_data_ref=[batch], dp_rank=0, dp_size=1)
    assert found["partition"] == [2, 0, 1]


def test_a_slime_that_keeps_partition_keeps_its_own(slime: Any, args: Any, batch: Any) -> None:
    assert loaded(slime, args, [batch], Form(loader="keeps"))["partition"] == [2, 0, 1]


def test_positions_become_plain_integers(slime: Any, args: Any, batch: Any) -> None:
    numpy = pytest.importorskip("numpy")
    found = loaded(slime, args, [{**batch, "partition": list(numpy.array([2, 0, 1]))}])["partition"]
    assert [type(position) for position in found] == [int] * 3


@pytest.mark.parametrize("odd", [["a", "b", "c"], [None, None, None]])
def test_positions_that_are_no_numbers_cost_the_dump_and_never_the_training(
    slime: Any, args: Any, batch: Any, odd: Any
) -> None:
    fake = slime(
        slime__utils__data="""
        import ray
        def process_rollout_data(args, rollout_data_ref, dp_rank, dp_size):
            rollout_data = ray.get(rollout_data_ref[dp_rank])
            rollout_data.pop("partition")
            return rollout_data
    """
    )
    runtime.instrument()
    found = fake.loader().process_rollout_data(args, [{**batch, "partition": odd}], 0, 1)
    assert "partition" not in found
    assert runtime.status()["data-loader"].failures == 1
    assert "data-loader failed" in str(runtime.current().take_failure())


def test_a_partition_of_another_length_is_not_put_back(slime: Any, args: Any, batch: Any) -> None:
    fake = slime(
        slime__utils__data="""
        import ray
        def process_rollout_data(args, rollout_data_ref, dp_rank, dp_size):
            rollout_data = ray.get(rollout_data_ref[dp_rank])
            rollout_data.pop("partition")
            return rollout_data
    """
    )
    runtime.instrument()
    assert "partition" not in fake.loader().process_rollout_data(args, [{**batch, "partition": [2, 0]}], 0, 1)
    assert runtime.current().positions_from == "unknown"


def test_what_the_loader_raises_comes_through_and_the_next_load_is_clean(slime: Any, args: Any, batch: Any) -> None:
    fake = slime()
    runtime.instrument()
    with pytest.raises(IndexError):
        fake.loader().process_rollout_data(args, [{**batch, "partition": [9, 9, 9]}], 0, 1)
    found = fake.loader().process_rollout_data(args, [{**batch, "partition": [1, 0, 2]}], 0, 1)
    assert found["partition"] == [1, 0, 2]


@pytest.mark.parametrize("reason", ["no dump", "no megatron"])
def test_without_a_dump_to_make_the_loaded_data_are_as_slime_has_them(
    slime: Any, args: Any, batch: Any, megatron: SimpleNamespace, reason: str
) -> None:
    if reason == "no dump":
        args.save_debug_train_data = None
    else:
        megatron.up = False
    assert "partition" not in loaded(slime, args, [batch])


def test_the_stand_in_for_ray_is_ray_for_everybody_else(slime: Any) -> None:
    fake = slime()
    runtime.instrument()
    loader = fake.loader()
    ray = sys.modules["ray"]
    assert loader.ray.get({"partition": [1]}) == {"partition": [1]}
    assert loader.ray == ray
    assert pickle.loads(pickle.dumps(loader.ray)) is ray
    assert isinstance(loader.ray, WatchedRay)
    runtime.uninstrument()
    assert loader.ray is ray


# ---------------------------------------------------------------- v0.2.0


def whole(lengths: list[int]) -> dict[str, Any]:
    return {
        "total_lengths": lengths,
        "response_lengths": [1] * len(lengths),
        "tokens": [torch.zeros(n) for n in lengths],
    }


@pytest.mark.parametrize("dp_rank", [0, 1])
def test_v020_every_nth_sample_is_worked_out(slime: Any, args: Any, dp_rank: int) -> None:
    found = loaded(slime, args, whole([3, 5, 4, 6]), Form(loader="v020"), dp_rank=dp_rank, dp_size=2)
    assert found["partition"] == [dp_rank, dp_rank + 2]
    assert runtime.current().positions_from == "reconstructed"


@pytest.mark.parametrize("per_prompt", [1, 2])
def test_v020_groups_balanced_by_length_are_worked_out(slime: Any, args: Any, per_prompt: int) -> None:
    args.balance_data, args.n_samples_per_prompt = True, per_prompt
    lengths = [9, 3, 4, 5, 8, 10, 7, 6]  # all different, so that a length names its sample
    positions = []
    for rank in (0, 1):
        found = loaded(slime, args, whole(lengths), Form(loader="v020"), dp_rank=rank, dp_size=2)
        assert found["partition"] == [lengths.index(length) for length in found["total_lengths"]]
        positions += found["partition"]
    assert sorted(positions) == list(range(8))


def test_v020_a_cut_that_the_lengths_do_not_prove_is_not_claimed(slime: Any, args: Any) -> None:
    slime(
        Form(loader="v020"),
        slime__utils__data="""
        import ray
        from slime.utils.timer import Timer
        def process_rollout_data(args, rollout_data_ref, dp_rank, dp_size):
            whole = ray.get(rollout_data_ref)
            Timer().seq_lens = whole["total_lengths"]
            return {key: value[len(value) // 2:] for key, value in whole.items()}  # another cut than the known ones
    """,
    )
    runtime.instrument()
    found = importlib.import_module("slime.utils.data").process_rollout_data(args, whole([3, 5, 4, 6]), 0, 2)
    assert "partition" not in found
    assert runtime.current().positions_from == "unknown"


@pytest.mark.parametrize("missing", ["timer", "balance function", "lengths that agree"])
def test_v020_what_cannot_be_known_is_not_claimed(
    slime: Any, args: Any, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    fake = slime(Form(loader="v020"))
    runtime.instrument()
    loader = fake.loader()
    args.balance_data = True
    if missing == "timer":
        monkeypatch.setattr(loader, "Timer", lambda: SimpleNamespace())
    elif missing == "balance function":
        loader.process_rollout_data(args, whole([3, 5]), 0, 2)
        monkeypatch.setattr(loader, "get_seqlen_balanced_partitions", None)
        args.balance_data = False
        monkeypatch.setattr(sys.modules["slime.utils.timer"].Timer(), "seq_lens", None, raising=False)
        monkeypatch.setattr(loader, "Timer", lambda: SimpleNamespace())
    else:
        args.n_samples_per_prompt = 2
        monkeypatch.setattr("slime_instrument._hooks.positions_v020._whole_batch_lengths", lambda: [3, 6, 4])
    found = loader.process_rollout_data(args, whole([3, 5, 4, 6]), 0, 2)
    assert "partition" not in found
    assert runtime.status()["data-loader"].failures == 0


# ---------------------------------------------------------------- metrics


def test_metrics_never_see_positions_but_their_own_additions_stay(slime: Any, args: Any, batch: Any) -> None:
    fake = slime()
    runtime.instrument()
    rollout_data = {**batch, "_slime_instrument_local": [0, 1, 2]}
    fake.data.log_rollout_data(0, args, rollout_data)
    assert [sorted(set(batch) - {"partition"})] == fake.data.LOGGED
    assert rollout_data["partition"] == [2, 0, 1]
    assert rollout_data["_slime_instrument_local"] == [0, 1, 2]
    assert rollout_data["entropy_of_log"] == [0.5] * 3


def test_positions_are_back_when_the_metrics_raise(slime: Any, args: Any, batch: Any) -> None:
    fake = slime()
    runtime.instrument()
    args.logging_fails = True
    with pytest.raises(OSError, match="wandb is down"):
        fake.data.log_rollout_data(rollout_id=0, args=args, rollout_data=batch)
    assert batch["partition"] == [2, 0, 1]


def test_the_metrics_that_moved_are_wrapped_where_they_are_now(slime: Any, args: Any, batch: Any) -> None:
    fake = slime(slime__observability__train_metric_utils="""
        SEEN = []
        def log_rollout_data(rollout_id, args, rollout_data):
            SEEN.append(sorted(rollout_data))
    """, slime__backends__megatron_utils__data="""
        from slime.observability.train_metric_utils import log_rollout_data
        class DataIterator:
            def get_next(self, keys): pass
    """)  # fmt: skip
    runtime.instrument()
    fake.data.log_rollout_data(0, args, batch)
    home = importlib.import_module("slime.observability.train_metric_utils")
    assert [sorted(set(batch) - {"partition"})] == home.SEEN
    assert runtime.status()["rollout-metrics"].target == "slime.observability.train_metric_utils.log_rollout_data"
    runtime.uninstrument()
    assert fake.data.log_rollout_data is home.log_rollout_data
