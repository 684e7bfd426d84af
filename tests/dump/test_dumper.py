"""Whole dumps by real processes in gloo groups: groups that are destroyed and rebuilt, several calls in one rollout,
ranks that differ, and what the journal says of it."""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import megatron_groups
from benchmarks.ranks import run_on_ranks
from benchmarks.shards import Case, rollout_data
from slime_instrument._dump import dumper as dumper_module
from slime_instrument._dump.agree import Seen, Topology
from slime_instrument._dump.dumper import Dumper
from slime_instrument._errors import DumpError
from slime_instrument._format.journal import read_journal
from slime_instrument._settings import Settings

CASE = Case(cp=2, dp=2, samples=5, response=20, fields=4)
TIMEOUT_S = 1.5


@pytest.fixture(autouse=True)
def no_megatron(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in for Megatron's groups, in this test only."""
    names = ("megatron", "megatron.core", "megatron.core.parallel_state", "megatron.core.mpu")
    before = {name: sys.modules.get(name) for name in names}
    megatron_groups.load(stand_in=True)
    yield
    for name, module in before.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module


def report(where: str, error: BaseException, lost: str, *, may_raise: bool = True) -> None:
    raise error


def dumper(**settings: Any) -> Dumper:
    return Dumper(Settings(**{"timeout_s": 20.0, **settings}), report)


def args(folder: Path, name: str = "{rollout_id}.pt") -> SimpleNamespace:
    return SimpleNamespace(save_debug_train_data=str(folder / name), qkv_format="thd", num_rollout=None)


def dump(made: Dumper, rank: int, folder: Path, rollout_id: int, name: str = "{rollout_id}.pt") -> str:
    """What became of it, in words."""
    try:
        made.dump(args(folder, name), rollout_id, rollout_data(CASE, rank), Seen())
    except DumpError as error:
        return str(error)
    return "done"


def dump_once(made: Dumper, rank: int, folder: Path, rollout_id: int) -> str:
    made.begin(rollout_id)
    dist.barrier()  # in the place of a training step, in which all ranks take part
    return dump(made, rank, folder, rollout_id)


def on_ranks(body: Any, *, gloo_groups: bool = True) -> list[Any]:
    return run_on_ranks(CASE.world, CASE.cp, body, gloo_groups=gloo_groups, timeout_s=100)


def loaded(folder: Path) -> dict[str, Any]:
    return {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))}


def assert_same_samples(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert len(one["samples"]) == len(other["samples"]) == 10
    for first, second in zip(one["samples"], other["samples"], strict=True):
        assert first.keys() == second.keys()
        for key, value in first.items():
            assert torch.equal(value, second[key]) if torch.is_tensor(value) else value == second[key]


def plain(folder: Path, rank: int) -> str:
    return dump_once(dumper(), rank, folder, 0)


@pytest.fixture
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("plain")
    assert on_ranks(partial(plain, folder)) == ["done"] * 4
    (only,) = loaded(folder).values()
    return only


def test_no_gloo_groups_are_needed(expected: dict[str, Any], tmp_path: Path) -> None:
    assert on_ranks(partial(plain, tmp_path), gloo_groups=False) == ["done"] * 4
    assert_same_samples(loaded(tmp_path)["0.pt"], expected)


def rebuilt(folder: Path, settings: dict[str, Any], rank: int) -> list[str]:
    """Everything is destroyed, the default group too, and comes back over the old store under a new prefix."""
    from torch.distributed import distributed_c10d

    made, store = dumper(**settings), distributed_c10d._get_default_store()
    made.start(args(folder), [], "test")
    said = [dump_once(made, rank, folder, 0)]
    for generation in (1, 2):
        dist.barrier()
        dist.destroy_process_group()
        again = dist.PrefixStore(f"generation-{generation}", store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=CASE.world)
        megatron_groups.initialise(CASE.cp)
        said.append(dump_once(made, rank, folder, generation))
    made._background.flush()
    return said


def test_groups_that_were_destroyed_and_rebuilt_do_not_matter(expected: dict[str, Any], tmp_path: Path) -> None:
    assert on_ranks(partial(rebuilt, tmp_path, {})) == [["done"] * 3] * 4
    found = loaded(tmp_path)
    assert [one["rollout_id"] for one in found.values()] == [0, 1, 2]
    for one in found.values():
        assert_same_samples(one, expected)
    said = read_journal(tmp_path)
    assert [(one.rollout_id, one.state) for one in said.rollouts] == [(0, "written"), (1, "written"), (2, "written")]
    assert [one.size for one in said.rollouts] == [(tmp_path / name).stat().st_size for name in found]
    assert said.starts[0]["layout"]["context_parallel"] == 2


def store_gone_for_a_while(folder: Path, gone: int, rank: int) -> list[str]:
    """WORLD is destroyed and made again before each rollout; in two of them rank ``gone`` finds no store."""
    from torch.distributed import distributed_c10d

    find, made, said = distributed_c10d._get_default_store, dumper(timeout_s=TIMEOUT_S), []
    store = find()
    for rollout_id in range(4):
        dist.barrier()
        dist.destroy_process_group()
        again = dist.PrefixStore(f"generation-{rollout_id}", store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=CASE.world)
        megatron_groups.initialise(CASE.cp)
        if rank == gone and rollout_id in (1, 2):
            distributed_c10d._get_default_store = no_store
        said.append(dump_once(made, rank, folder, rollout_id))
        distributed_c10d._get_default_store = find
    return said


def no_store() -> Any:
    raise dist.DistNetworkError("nothing answers")


@pytest.mark.parametrize("gone", [0, 3])
def test_a_rank_whose_store_is_gone_for_a_while_costs_those_dumps_and_no_later_one(
    expected: dict[str, Any], tmp_path: Path, gone: int
) -> None:
    results = on_ranks(partial(store_gone_for_a_while, tmp_path, gone))
    for rank, said in enumerate(results):
        assert (said[0], said[3]) == ("done", "done")
        for lost in said[1:3]:
            assert ("the job's store does not answer" if rank == gone else f"rank(s) [{gone}]") in lost
    assert list(loaded(tmp_path)) == ["0.pt", "3.pt"]
    for one in loaded(tmp_path).values():
        assert_same_samples(one, expected)


def test_asynchronous_writing_leaves_the_same_files_and_rotates_them(expected: dict[str, Any], tmp_path: Path) -> None:
    assert on_ranks(partial(rebuilt, tmp_path, {"async_write": True, "keep_last": 2})) == [["done"] * 3] * 4
    assert list(loaded(tmp_path)) == ["1.pt", "2.pt"]
    for one in loaded(tmp_path).values():
        assert_same_samples(one, expected)
    said = read_journal(tmp_path)
    assert [(one.rollout_id, one.state) for one in said.rollouts] == [(0, "removed"), (1, "written"), (2, "written")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.pt", "2.pt", "instrument.jsonl"]


def two_calls(folder: Path, rank: int) -> list[str]:
    made = dumper()
    made.begin(0)
    dist.barrier()
    return [dump(made, rank, folder, 0, name) for name in ("first.pt", "second.pt")]


def test_two_calls_in_one_rollout_both_write(expected: dict[str, Any], tmp_path: Path) -> None:
    assert on_ranks(partial(two_calls, tmp_path)) == [["done"] * 2] * 4
    for name in ("first.pt", "second.pt"):
        assert_same_samples(loaded(tmp_path)[name], expected)


def different_paths(folder: Path, rank: int) -> list[str]:
    made = dumper()
    made.begin(0)
    dist.barrier()
    return [dump(made, rank, folder, 0, f"{min(rank, 1)}.pt"), dump_once(made, rank, folder, 1)]


def test_ranks_that_differ_in_the_path_are_refused_with_both_and_the_next_dump_works(tmp_path: Path) -> None:
    results = on_ranks(partial(different_paths, tmp_path))
    assert all("the ranks dump to different paths" in first for first, _ in results)
    assert [second for _, second in results] == ["done"] * 4
    assert list(loaded(tmp_path)) == ["1.pt"]


def some_ranks_only(folder: Path, callers: tuple[int, ...], rank: int) -> tuple[list[str], list[float]]:
    import time

    made, said, seconds = dumper(timeout_s=TIMEOUT_S), [], []
    for rollout_id in range(4):
        made.begin(rollout_id)
        dist.barrier()
        began = time.monotonic()
        if rank in callers or rollout_id == 3:
            said.append(dump(made, rank, folder, rollout_id))
        seconds.append(time.monotonic() - began)
        dist.barrier()
    return said, seconds


@pytest.mark.parametrize("callers", [(0,), (1, 2, 3), (0, 1, 3)])
def test_calls_on_some_ranks_only_wait_once(tmp_path: Path, callers: tuple[int, ...]) -> None:
    results = on_ranks(partial(some_ranks_only, tmp_path, callers))
    for rank in callers:
        said, seconds = results[rank]
        assert "did not come within" in said[0]
        assert all("not waited for again until it comes" in one for one in said[1:3])
        assert seconds[0] >= TIMEOUT_S * 0.9
        assert max(seconds[1:3]) < TIMEOUT_S * 0.9
    assert not (tmp_path / "1.pt").exists()


def one_fails(folder: Path, failing: int, rank: int) -> list[str]:
    made = dumper()
    made.begin(0)
    dist.barrier()
    data = rollout_data(CASE, rank)
    if rank == failing:
        data["response_lengths"] = data["response_lengths"][:-1]
    try:
        made.dump(args(folder), 0, data, Seen())
        said = "done"
    except DumpError as error:
        said = str(error)
    return [said, dump_once(made, rank, folder, 1)]


@pytest.mark.parametrize("failing", [0, 3])
def test_a_rank_that_fails_costs_this_dump_with_its_reason_on_all_and_no_other(tmp_path: Path, failing: int) -> None:
    results = on_ranks(partial(one_fails, tmp_path, failing))
    for rank, (first, second) in enumerate(results):
        assert "total_lengths has 5 samples, response_lengths 4" in first
        assert rank == failing or f"rank {failing}: " in first
        assert second == "done"
    assert list(loaded(tmp_path)) == ["1.pt"]


# ---------------------------------------------------------------------------------------------------------------------
# Found by attacks


class Forbidding(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ValueError(f"{func} is forbidden")


class ForbiddingFunctions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ValueError(f"{func} is forbidden")


def under_modes(folder: Path, rank: int) -> list[str]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    made, said, device = dumper(), [], torch.device("meta")
    for number, mode in enumerate((Forbidding(), ForbiddingFunctions(), FakeTensorMode(), device)):
        made.begin(number)
        data = rollout_data(CASE, rank)
        dist.barrier()
        with mode:
            try:
                made.dump(args(folder), number, data, Seen())
            except DumpError as error:
                said.append(str(error))
            else:
                said.append("done")
    return said


def test_the_users_own_modes_of_torch_do_not_see_the_dump(expected: dict[str, Any], tmp_path: Path) -> None:
    assert on_ranks(partial(under_modes, tmp_path)) == [["done"] * 4] * 4
    found = loaded(tmp_path)
    assert len(found) == 4
    for one in found.values():
        assert_same_samples(one, expected)


def in_the_folder_of_the_moment(folder: Path, rank: int) -> str:
    """A relative path, and training that changes its folder while the file is written in the background."""
    made, home = dumper(async_write=True, keep_last=1), os.getcwd()
    relative = SimpleNamespace(save_debug_train_data="dumps/{rollout_id}.pt", qkv_format="thd", num_rollout=None)
    try:
        for number in (0, 1):
            os.chdir(folder)
            made.begin(number)
            dist.barrier()
            made.dump(relative, number, rollout_data(CASE, rank), Seen())
            os.chdir(home)
        made._background.flush()
    finally:
        os.chdir(home)
    return "done"


def test_a_relative_path_means_the_folder_at_the_time_of_the_call(tmp_path: Path) -> None:
    assert on_ranks(partial(in_the_folder_of_the_moment, tmp_path)) == ["done"] * 4
    assert list(loaded(tmp_path / "dumps")) == ["1.pt"]
    said = read_journal(tmp_path / "dumps")
    assert [(one.rollout_id, one.state) for one in said.rollouts] == [(0, "removed"), (1, "written")]


SHORTAGES = [MemoryError(), OSError(24, "Too many open files"), RuntimeError("can't allocate memory: you tried 1 TB")]


def short_of(shortage: Exception, folder: Path, rank: int) -> list[str]:
    made, said = dumper(), []
    build = dumper_module.build_payload

    def fail(*_: Any, **__: Any) -> Any:
        raise shortage

    for number in range(2):
        dumper_module.build_payload = fail if number == 0 and rank == 0 else build
        said.append(dump_once(made, rank, folder, number))
    return said


@pytest.mark.parametrize("shortage", SHORTAGES, ids=lambda error: type(error).__name__)
def test_what_the_machine_lacks_costs_one_dump_and_is_no_fault_of_ours(shortage: Exception, tmp_path: Path) -> None:
    said = on_ranks(partial(short_of, shortage, tmp_path))
    assert said[0][0].startswith("the dump failed: ")
    assert said[0][1] == "done"
    assert list(loaded(tmp_path)) == ["1.pt"]
    assert [one.state for one in read_journal(tmp_path).rollouts] == ["lost", "written"]


def only_some_call(folder: Path, callers: tuple[int, ...], rank: int) -> list[str]:
    """Two rollouts, in which a trainer of the user's calls the dump on some ranks only."""
    made, found = dumper(), []
    for rollout_id in (0, 1):
        made.begin(rollout_id)
        dist.barrier()
        found.append(dump(made, rank, folder, rollout_id) if rank in callers else "no call")
        made.ended(rollout_id)
    return found


def test_where_only_some_ranks_call_the_dump_it_holds_what_they_have(expected: dict[str, Any], tmp_path: Path) -> None:
    assert on_ranks(partial(only_some_call, tmp_path, (0, 1))) == [["done"] * 2] * 2 + [["no call"] * 2] * 2
    dumps = loaded(tmp_path)
    assert list(dumps) == ["0.pt", "1.pt"]
    for found in dumps.values():
        assert [shard["data_parallel_rank"] for shard in found["dp_shards"]] == [0]
        assert {sample["data_parallel_rank"] for sample in found["samples"]} == {0}
        ours = [sample for sample in expected["samples"] if sample["data_parallel_rank"] == 0]
        for one, other in zip(found["samples"], ours, strict=True):
            assert one.keys() == other.keys()
            assert torch.equal(one["log_probs"], other["log_probs"])
    said = read_journal(tmp_path)
    reason = "which ended their train_actor without calling the dump"
    assert [dict(one.left_out) for one in said.rollouts] == [{"rank(s) [2, 3]": reason}] * 2
    assert not said.healthy
    assert "rollout 1 lacks rank(s) [2, 3]" in str(said)


def test_half_of_a_context_parallel_pair_is_no_dump(tmp_path: Path) -> None:
    on_ranks_0_and_1 = on_ranks(partial(only_some_call, tmp_path, (0, 2, 3)))[:2]
    assert "rank(s) [1] contributed nothing" in on_ranks_0_and_1[0][0]
    assert on_ranks_0_and_1[1] == ["no call"] * 2
    assert loaded(tmp_path) == {}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is the only rank."""
    monkeypatch.setattr(dumper_module, "read_topology", lambda: Topology(0, 1, 0, 1, 1, 0, 1, 0, True, (0,)))


def test_a_dump_that_is_lost_while_an_earlier_file_comes_into_place_is_in_the_journal(
    alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), dumper_module.write_dump

    def slow(*given: Any) -> int:
        gate.wait(30)
        return real(*given)

    def fail(*_: Any) -> Any:
        gate.set()
        thread = made._background._thread
        assert thread is not None
        thread.join()
        raise DumpError("no luck")

    monkeypatch.setattr(dumper_module, "write_dump", slow)
    made, data = dumper(async_write=True), rollout_data(CASE, 0)
    made.dump(args(tmp_path), 0, data, Seen())
    monkeypatch.setattr(made, "_contribution", fail)
    with pytest.raises(DumpError, match="no luck"):
        made.dump(args(tmp_path), 1, data, Seen())
    assert [(one.rollout_id, one.state) for one in read_journal(tmp_path).rollouts] == [(0, "written"), (1, "lost")]


def test_a_dump_that_is_pending_when_something_else_fails_is_not_lost(alone: None, tmp_path: Path) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for number, settings in enumerate(({"async_write": True}, {})):
        folder = tmp_path / str(number)
        made = Dumper(Settings(timeout_s=20.0, **settings), report, interrupted)
        with pytest.raises(KeyboardInterrupt):
            made.dump(args(folder), 0, rollout_data(CASE, 0), Seen())
        made._background.flush()
        assert [(one.rollout_id, one.state) for one in read_journal(folder).rollouts] == [(0, "written")]
