"""Positions survive loading, are worked out where they were never sent, and are claimed only when proven."""

from __future__ import annotations

import importlib
import pickle
import sys
import threading
from argparse import Namespace
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from slime_instrument import _runtime as runtime
from slime_instrument._hooks.loading import WatchedRay, reconstruct

from .fake_slime import PLAIN, Form

Load = Callable[..., dict[str, Any]]


def loaded(slime: Any, args: SimpleNamespace, reference: Any, form: Form = PLAIN, **call: Any) -> Any:
    fake = slime(form)
    runtime.instrument()
    return fake.loader().process_rollout_data(args, reference, **({"dp_rank": 0, "dp_size": 1} | call))


def test_partition_is_back_in_what_the_loader_returns(slime: Any, args: Any, batch: Any) -> None:
    assert loaded(slime, args, [batch])["partition"] == [2, 0, 1]
    assert runtime.current().loaded.positions_from == "partition"


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
    assert "data-loader failed" in str(runtime.current().take_failures())


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
    assert runtime.current().loaded.positions_from == "unknown"


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


WATCHED_LOADER = """
    import ray
    def process_rollout_data(args, rollout_data_ref, dp_rank, dp_size):
        return args.then(lambda: ray.get(rollout_data_ref[dp_rank]))
"""


def test_ray_is_replaced_while_data_are_loaded_only(slime: Any, args: Any) -> None:
    fake = slime(slime__utils__data=WATCHED_LOADER)
    runtime.instrument()
    loader, ray = fake.loader(), sys.modules["ray"]
    seen: list[Any] = []

    def look(get: Callable[[], Any]) -> Any:
        seen.append((type(loader.ray) is WatchedRay, loader.ray == ray, pickle.loads(pickle.dumps(loader.ray)) is ray))
        return get()

    args.then = look
    loader.process_rollout_data(args, [{"partition": [0], "total_lengths": [1]}], 0, 1)
    assert seen == [(True, True, True)]
    assert loader.ray is ray


def test_loads_in_several_threads_each_see_their_own_and_ray_is_back_after_the_last(slime: Any, args: Any) -> None:
    fake = slime(slime__utils__data=WATCHED_LOADER.replace(
        "return args.then", "rollout_data = args.then"
    ) + "        rollout_data.pop('partition')\n        return rollout_data\n")  # fmt: skip
    runtime.instrument()
    loader, ray = fake.loader(), sys.modules["ray"]
    barrier = threading.Barrier(4)

    def together(get: Callable[[], Any]) -> Any:
        barrier.wait(10)
        found = get()
        barrier.wait(10)
        return found

    args.then = together
    boxes = [{"partition": [number], "total_lengths": [1]} for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: loader.process_rollout_data(args, boxes, number, 4), range(4)))
    assert [each["partition"] for each in found] == [[0], [1], [2], [3]]
    assert loader.ray is ray


def test_data_that_another_thread_fetches_for_the_load_are_seen(slime: Any, args: Any) -> None:
    fake = slime(slime__utils__data=WATCHED_LOADER.replace(
        "return args.then", "rollout_data = args.then"
    ) + "        rollout_data.pop('partition')\n        return rollout_data\n")  # fmt: skip
    runtime.instrument()
    with ThreadPoolExecutor(1) as pool:
        args.then = lambda get: pool.submit(get).result()
        found = fake.loader().process_rollout_data(args, [{"partition": [3], "total_lengths": [1]}], 0, 1)
    assert found["partition"] == [3]


def test_a_loader_without_ray_costs_the_positions_and_nothing_else(slime: Any, args: Any) -> None:
    fake = slime(
        slime__utils__data="""
        def process_rollout_data(args, rollout_data_ref, dp_rank, dp_size):
            return {"total_lengths": [1]}
    """
    )
    runtime.instrument()
    assert fake.loader().process_rollout_data(args, [], 0, 1) == {"total_lengths": [1]}
    assert runtime.current().loaded.positions_from == "unknown"
    assert runtime.status()["data-loader"].failures == 0


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
    assert runtime.current().loaded.positions_from == "reconstructed"


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
    assert runtime.current().loaded.positions_from == "unknown"


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
        monkeypatch.setattr("slime_instrument._hooks.loading._whole_batch_lengths", lambda: [3, 6, 4])
    found = loader.process_rollout_data(args, whole([3, 5, 4, 6]), 0, 2)
    assert "partition" not in found
    assert runtime.status()["data-loader"].failures == 0


# what v0.2.0 leaves behind, without a loader

LENGTHS = [9, 4, 7, 7, 5, 6, 8, 3]


def dealt(lengths: list[int], parts: int, equal_size: bool) -> list[list[int]]:
    """A stand-in for slime's own balancing: longest first, dealt out in turn."""
    assert equal_size
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[part::parts] for part in range(parts)]


@pytest.fixture
def v020(monkeypatch: pytest.MonkeyPatch) -> None:
    """What v0.2.0 leaves behind: the timer with the lengths of the whole batch, and its balancing function."""

    class Timer:
        seq_lens = LENGTHS

    modules: dict[str, dict[str, Any]] = {
        "slime.utils.timer": {"Timer": Timer},
        "slime.utils.data": {"get_seqlen_balanced_partitions": dealt},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)


def local(positions: list[int]) -> dict[str, Any]:
    return {"total_lengths": [LENGTHS[position] for position in positions]}


in_v020 = pytest.mark.usefixtures("v020")


@in_v020
def test_every_dp_sizeth_sample_without_balancing() -> None:
    args = Namespace(balance_data=False)
    assert reconstruct(args, local([1, 3, 5, 7]), 1, 2) == [1, 3, 5, 7]
    assert reconstruct(args, local([2, 6]), 2, 4) == [2, 6]


@in_v020
def test_whole_groups_balanced_by_length() -> None:
    args = Namespace(balance_data=True, n_samples_per_prompt=2)  # groups of 13, 14, 11 and 11 tokens
    assert reconstruct(args, local([2, 3, 4, 5]), 0, 2) == [2, 3, 4, 5]
    assert reconstruct(args, local([0, 1, 6, 7]), 1, 2) == [0, 1, 6, 7]


@in_v020
def test_samples_beyond_the_last_whole_group_are_on_no_rank() -> None:
    args = Namespace(balance_data=True, n_samples_per_prompt=4)  # one group each of 27 and 22 tokens
    assert reconstruct(args, local([0, 1, 2, 3]), 0, 2) == [0, 1, 2, 3]
    args.n_samples_per_prompt = 3  # 20 and 18 tokens; 6 and 7 are left over
    assert reconstruct(args, local([3, 4, 5]), 1, 2) == [3, 4, 5]


@in_v020
def test_nothing_is_claimed_where_the_lengths_contradict() -> None:
    args = Namespace(balance_data=False)
    assert reconstruct(args, local([0, 2, 4, 7]), 0, 2) is None
    assert reconstruct(args, local([0, 2]), 0, 2) is None


@in_v020
def test_nothing_is_claimed_where_the_whole_batch_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "slime.utils.timer")
    assert reconstruct(Namespace(balance_data=False), local([0, 2, 4, 6]), 0, 2) is None


@in_v020
def test_nothing_is_claimed_where_balancing_is_not_slimes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "slime.utils.data")
    args = Namespace(balance_data=True, n_samples_per_prompt=2)
    assert reconstruct(args, local([2, 3, 4, 5]), 0, 2) is None


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
