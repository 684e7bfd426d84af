"""Agreement of ranks over a store, ranks as threads."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from slime_instrument._dump import agree
from slime_instrument._dump.agree import (
    Agreement,
    CallId,
    NotAgreed,
    Patience,
    Presence,
    _Careful,
    give_up,
)
from slime_instrument._errors import DumpError
from slime_instrument._settings import Pins

from .ranks import topology
from .threads import together

WORLD = 4
CALL = CallId(0, 0, 0)


def quiet(text: str) -> None:
    pass


def agreement(
    store: Any, rank: int, call: CallId = CALL, timeout_s: float = 5.0, missed: Any = None, **more: Any
) -> Agreement:
    return Agreement(
        store, call, topology(1, 0, WORLD, rank), timeout_s, {} if missed is None else missed, quiet, **more
    )


def writer(store: Any, **more: Any) -> Callable[[], Any]:
    def work() -> Any:
        mine = agreement(store, 0, **more)
        mine.arrive("path of 0")
        templates = mine.wait_for_all()
        mine.go({"port": 7})
        return templates

    return work


def sender(store: Any, rank: int, **more: Any) -> Callable[[], Any]:
    def work() -> Any:
        mine = agreement(store, rank, **more)
        mine.arrive(f"path of {rank}")
        return mine.wait_for_go()

    return work


def all_ranks(store: Any, **more: Any) -> dict[int, Callable[[], Any]]:
    return {0: writer(store, **more), **{rank: sender(store, rank, **more) for rank in range(1, WORLD)}}


def reasons(results: list[Any]) -> set[str]:
    assert all(isinstance(result, NotAgreed) for result in results), results
    return {str(result) for result in results}


def test_when_all_come_the_writer_knows_their_paths_and_all_know_where_to_send_to(store: Any) -> None:
    results = together(list(all_ranks(store).values()))
    assert results == [{rank: f"path of {rank}" for rank in range(1, WORLD)}, *[{"port": 7}] * (WORLD - 1)]


@pytest.mark.parametrize("who", range(WORLD))
def test_when_one_gives_up_all_skip_with_its_reason_and_at_once(store: Any, who: int) -> None:
    works = all_ranks(store)

    def give_up() -> None:
        time.sleep(0.05)
        agreement(store, who).give_up("no memory")

    works[who] = give_up
    began = time.monotonic()
    results = together(list(works.values()))
    assert reasons([result for rank, result in enumerate(results) if rank != who]) == {f"rank {who}: no memory"}
    assert time.monotonic() - began < 4.0


@pytest.mark.parametrize("who", range(WORLD))
def test_a_rank_that_never_comes_is_waited_for_a_bounded_time_and_named(store: Any, who: int) -> None:
    works = all_ranks(store, timeout_s=0.3)
    del works[who]
    began = time.monotonic()
    (reason,) = reasons(together(list(works.values())))
    assert f"rank(s) [{who}] did not come within 0.3 s" in reason
    assert 0.2 <= time.monotonic() - began < 4.0


@pytest.mark.parametrize("who", range(WORLD))
def test_a_rank_that_never_comes_is_waited_for_once_and_trusted_again_when_it_comes(store: Any, who: int) -> None:
    missed: dict[int, Any] = {rank: {} for rank in range(WORLD)}

    def run(call: CallId, absent: set[int]) -> tuple[list[Any], float]:
        works = {
            rank: (writer if rank == 0 else lambda s, rank=rank, **m: sender(s, rank, **m))(  # type: ignore[misc]
                store, call=call, timeout_s=0.5, missed=missed[rank]
            )
            for rank in range(WORLD)
            if rank not in absent
        }
        began = time.monotonic()
        return together(list(works.values())), time.monotonic() - began

    reasons(run(CallId(0, 0, 0), {who})[0])
    results, seconds = run(CallId(1, 0, 0), {who})
    assert any(f"rank {who} did not come to the dump of rollout 0" in reason for reason in reasons(results))
    assert seconds < 0.45
    # It comes late to rollout 1, finds it decided, and is there for rollout 2.
    late = agreement(store, who, CallId(1, 0, 0))
    late.arrive("path")
    with pytest.raises(NotAgreed):
        late.wait_for_all() if who == 0 else late.wait_for_go()
    late_before = agreement(store, who, CallId(0, 0, 0))
    late_before.arrive("path")
    results, _ = run(CallId(2, 0, 0), set())
    assert not any(isinstance(result, Exception) for result in results), results


def test_a_rank_that_comes_after_the_others_gave_up_skips_at_once(store: Any) -> None:
    with pytest.raises(NotAgreed, match=r"did not come within 0\.1 s"):
        writer(store, timeout_s=0.1)()
    began = time.monotonic()
    with pytest.raises(NotAgreed, match=r"within 0\.1 s \(rank 0 waited\)"):
        sender(store, 1)()
    assert time.monotonic() - began < 0.2


def test_the_writer_does_not_start_when_somebody_gave_up_after_it_had_come(store: Any) -> None:
    for rank in range(1, WORLD):
        agreement(store, rank).arrive("path")
    mine = agreement(store, 0)
    mine.wait_for_all()
    agreement(store, 2).give_up("killed")
    with pytest.raises(NotAgreed, match="rank 2: killed"):
        mine.go({})


def test_giving_up_after_the_start_changes_no_decision_but_tells_why(store: Any) -> None:
    together(list(all_ranks(store).values()))
    agreement(store, 1).give_up("too late")
    assert agreement(store, 0).failure() == "rank 1: too late"
    assert agreement(store, 2).wait_for_go() == {"port": 7}


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_timing_all_ranks_that_decide_decide_the_same(store: Any, seed: int) -> None:
    chance = random.Random(seed)

    def late(work: Callable[[], Any], delay: float) -> Callable[[], Any]:
        def run() -> Any:
            time.sleep(delay)
            return work()

        return run

    works = list(all_ranks(store, timeout_s=0.02).values())
    if seed % 2:
        works.append(lambda: agreement(store, 1).give_up("changed its mind"))
    results = together([late(work, chance.uniform(0, 0.03)) for work in works])[:WORLD]
    assert len({isinstance(result, NotAgreed) for result in results}) == 1, results


@pytest.mark.parametrize("other", [CallId(1, 0, 0), CallId(0, 1, 0), CallId(0, 0, 1)])
def test_calls_of_another_rollout_attempt_or_number_do_not_meet(store: Any, other: CallId) -> None:
    agreement(store, 1).give_up("first attempt")
    results = together(list(all_ranks(store, call=other).values()))
    assert not any(isinstance(result, Exception) for result in results)


def test_a_finished_call_leaves_no_keys_behind(store: Any) -> None:
    together(list(all_ranks(store).values()))
    agreement(store, 0).forget()
    assert not any(store.check([f"slime_instrument/0/0/0/{key}"]) for key in ("count", "decision", "ready/1"))


class Broken:
    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> Any:
            raise RuntimeError("the store is gone")

        return fail


def test_giving_up_never_raises_and_neither_does_forgetting() -> None:
    mine = agreement(Broken(), 0)
    mine.give_up("anything")
    mine.forget()
    assert mine.failure() is None


def test_the_wait_polls_with_growing_pauses_says_what_it_waits_for_and_ends_on_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, naps, said = [0.0], [], []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(agree, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: clock[0]))
    mine = Agreement(dist.HashStore(), CALL, topology(1, 0, WORLD, 0), 25.0, {}, said.append)
    mine.arrive("x")
    with pytest.raises(NotAgreed, match="within 25 s"):
        mine.wait_for_all()
    assert 25.0 <= clock[0] < 25.2
    assert naps[0] < 0.001
    assert max(naps) <= 0.05
    assert len(naps) < 2000
    assert said == ["waiting for rank(s) [1, 2, 3] since 10 s", "waiting for rank(s) [1, 2, 3] since 20 s"]


def test_patience_counts_only_the_time_in_which_it_waited() -> None:
    """A process that was stopped for an hour has not been waiting for an hour."""
    patience = Patience(1.0, lambda: "x", quiet)
    assert patience.waited(3600.0, at_most=0.05)
    assert all(patience.waited(0.05, 0.05) for _ in range(15))
    patience.moved()
    assert all(patience.waited(0.05, 0.05) for _ in range(15))
    assert not all(patience.waited(0.05, 0.05) for _ in range(10))


def presence(store: Any, rank: int) -> Presence:
    made = Presence()
    made.store = _Careful(store)
    made._announce(store, rank)
    return made


def test_ranks_that_did_not_announce_themselves_or_stepped_out_are_named_with_their_reasons(store: Any) -> None:
    first = presence(store, 0)
    assert first.absent([0]) is None
    assert first.absent([0, 1, 2]) == "rank(s) [1, 2] train without instrumentation"
    others = [presence(store, rank) for rank in (1, 2)]
    assert first.absent([0, 1, 2]) is None
    others[1].step_out("three failures in a row")
    assert first.absent([0, 1, 2]) == "rank 2 dumps no more (three failures in a row)"
    assert first.absent([0, 1]) is None


@pytest.mark.parametrize("reason", ["no \udcff in UTF-8", "x" * (20 << 20)], ids=["not UTF-8", "20 MB"])
def test_a_reason_of_any_kind_reaches_the_others(reason: str) -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)

    def give_up() -> None:
        agreement(store.clone(), 0).give_up(reason)

    began = time.monotonic()
    results = together([give_up, *(sender(store.clone(), rank) for rank in range(1, WORLD))])
    assert results[0] is None
    assert all(text.startswith("rank 0: ") for text in reasons(results[1:]))
    assert time.monotonic() - began < 4.0


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_ended_its_step_without_a_call_is_not_waited_for(store: Any, who: int) -> None:
    works = {**all_ranks(store, timeout_s=15.0), who: agreement(store, who).pass_by}
    began = time.monotonic()
    results = together([works[rank] for rank in range(WORLD)])
    assert time.monotonic() - began < 10.0
    if who:  # the others dump without it
        assert results == [{1: "path of 1", 3: "path of 3"}, {"port": 7}, None, {"port": 7}]
    else:
        (reason,) = reasons(results[1:])
        assert "rank 0 ended its train_actor without calling the dump, whose file it writes" in reason


def test_where_the_dump_is_called_after_the_step_everybody_is_waited_for(store: Any) -> None:
    for rank in range(WORLD):
        agreement(store, rank).pass_by()
    works = list(all_ranks(store, timeout_s=15.0).values())
    results = together([*works[:3], lambda: (time.sleep(1.0), works[3]())[1]])
    assert results[1:] == [{"port": 7}] * 3


def test_a_rank_that_calls_the_dump_after_its_step_is_still_taken(store: Any) -> None:
    agreement(store, 2).pass_by()
    results = together(list(all_ranks(store).values()))
    assert results[1:] == [{"port": 7}] * 3


def test_a_store_that_answers_slowly_does_not_stretch_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        def __getattr__(self, name: str) -> Any:
            def ask(*arguments: Any) -> Any:
                clock[0] += 0.2
                return getattr(inner, name)(*arguments)

            return ask

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    clock, inner = [0.0], dist.HashStore()
    monkeypatch.setattr(agree, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: clock[0]))
    mine: Any = Agreement(Slow(), CALL, topology(1, 0, WORLD, 0), 10.0, {}, quiet)
    mine.arrive("x")
    with pytest.raises(NotAgreed, match="within 10 s"):
        mine.wait_for_all()
    assert clock[0] < 30.0


@pytest.mark.parametrize("error", [RuntimeError("Broken pipe"), OSError("gone"), dist.DistStoreError("no answer")])
def test_a_store_that_fails_is_no_fault_of_ours(error: Exception) -> None:
    class Failing:
        def __getattr__(self, name: str) -> Any:
            raise error

    with pytest.raises(DumpError, match="the job's store does not answer"):
        _Careful(Failing()).get("x")


def test_ranks_whose_settings_leave_a_rollout_out_are_known_before_anybody_waits(store: Any) -> None:
    made = [Presence(), Presence(every=3, pin=Pins(((4, 5),)))]
    for rank, one in enumerate(made):
        one.store = _Careful(store)
        one._announce(store, rank)
    assert [i for i in range(8) if made[0].skips([0, 1], i) == []] == [0, 3, 4, 5, 6]
    assert made[0].skips([0, 1], 1) == [1]
    assert made[0].skips([0], 1) == []


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_is_back_costs_at_most_one_dump_though_it_always_comes_last(store: Any, who: int) -> None:
    calls = [CallId(rollout_id, 0, 0) for rollout_id in range(5)]
    missed: dict[int, Any] = {rank: {} for rank in range(WORLD)}
    whole = []
    for call in calls:
        works = []
        for rank in range(WORLD):
            make: Any = partial(writer, store) if rank == 0 else partial(sender, store, rank)
            work = make(call=call, timeout_s=0.5 if call is calls[0] else 8.0, missed=missed[rank])
            if rank == who:
                work = (lambda: None) if call.rollout_id < 2 else partial(_late, work)
            works.append(work)
        results = together(works)
        whole.append(not any(isinstance(result, Exception) for result in results if result is not None))
    assert whole[3:] == [True, True]


def _late(work: Callable[[], Any]) -> Any:
    time.sleep(0.3)
    return work()


def test_giving_up_is_never_held_up_for_long_by_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree, "_TELLING_S", 0.1)
    freed = threading.Event()

    class Stuck:
        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            freed.wait(30)
            return b""

    began = time.monotonic()
    give_up(_Careful(Stuck()), CALL, 0, "no luck")
    freed.set()
    assert time.monotonic() - began < 5.0


class Moody:
    """A job's store that fails when asked to; its clones are connections to the same values."""

    host = "127.0.0.1"

    def __init__(self, inner: Any, port: int) -> None:
        self.inner, self.port, self.clones, self.failing = inner, port, 0, 0

    def clone(self) -> Any:
        self.clones += 1
        return Connection(self)


class Connection:
    def __init__(self, of: Moody) -> None:
        self.of = of

    def __getattr__(self, name: str) -> Any:
        if self.of.failing:
            self.of.failing -= 1
            raise RuntimeError("Connection reset by peer")
        return getattr(self.of.inner, name)


@pytest.fixture
def moody(monkeypatch: pytest.MonkeyPatch) -> Iterator[Moody]:
    """The default store of this process, which is rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = Moody(dist.HashStore(), server.getsockname()[1])
        monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: made)
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        yield made


def test_an_announcement_that_failed_is_made_at_the_next_connection(moody: Moody) -> None:
    ours = Presence()
    moody.failing = 1
    with pytest.raises(DumpError, match="Connection reset"):
        ours.connect()
    ours.connect()
    assert ours.absent([0]) is None


def test_a_connection_that_broke_is_made_again(moody: Moody) -> None:
    ours = Presence()
    store = ours.connect()
    assert ours.connect() is store
    moody.failing = 1
    with pytest.raises(DumpError, match="Connection reset"):
        store.get("x")
    again = ours.connect()
    assert again is not store
    assert moody.clones == 2
    assert again.check(["slime_instrument/armed/0"])


def test_the_jobs_store_is_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a job makes a new store at the old one's address, the old one's server must have ended."""
    jobs: list[Any] = [dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)]
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: jobs[0])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    ours, port = Presence(), jobs[0].port
    ours.connect()
    assert ours.connect() is ours.store
    jobs.clear()
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0, "its server still listens"


def test_a_server_that_is_gone_is_not_waited_for(moody: Moody) -> None:
    """Cloning waits five minutes for it by default; and whoever ends meanwhile ends at once."""
    ours = Presence()
    store = ours.connect()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        moody.port = closed.getsockname()[1]
    moody.failing = 10
    with pytest.raises(DumpError, match="Connection reset"):
        store.get("x")
    with pytest.raises(DumpError, match="takes no connection"):
        ours.connect()
    ours.step_out("the end")
    assert moody.clones == 1


def test_a_store_without_a_server_that_failed_once_is_asked_again(moody: Moody) -> None:
    del moody.port
    ours = Presence()
    moody.failing = 1
    with pytest.raises(DumpError, match="Connection reset"):
        ours.connect()
    ours.connect()
    assert ours.absent([0]) is None
