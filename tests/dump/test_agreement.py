"""All ranks get the same decision, and none waits for one that gave up, died, or was never there."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from slime_instrument._dump.agreement import Agreement, NotAgreed, announce, not_armed, withdraw

from .threads import together

RANKS = (3, 5, 8, 9)


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def agreement(store: Any, rank: int, key: str = "0/0", timeout_s: float = 5.0) -> Agreement:
    return Agreement(store, key, rank, RANKS, timeout_s)


def writer(store: Any, **more: Any) -> Callable[[], Any]:
    def work() -> Any:
        mine = agreement(store, RANKS[0], **more)
        sizes = mine.gather_sizes()
        mine.go()
        return sizes

    return work


def sender(store: Any, rank: int, **more: Any) -> Callable[[], Any]:
    return lambda: agreement(store, rank, **more).ready(f"size of {rank}")


def messages(results: list[Any]) -> set[str]:
    assert all(isinstance(result, NotAgreed) for result in results), results
    return {str(result) for result in results}


def test_when_all_are_ready_the_writer_knows_their_sizes_and_all_go(store: Any) -> None:
    results = together([writer(store), *(sender(store, rank) for rank in RANKS[1:])])
    assert results == [{rank: f"size of {rank}" for rank in RANKS[1:]}, None, None, None]


@pytest.mark.parametrize("who", RANKS)
def test_when_one_gives_up_all_skip_with_its_reason_and_at_once(store: Any, who: int) -> None:
    works = [writer(store), *(sender(store, rank) for rank in RANKS[1:])]

    def give_up() -> None:
        time.sleep(0.05)
        agreement(store, who).give_up("no memory")

    works[RANKS.index(who)] = give_up
    began = time.monotonic()
    results = together(works)
    assert messages([result for rank, result in zip(RANKS, results, strict=True) if rank != who]) == {
        f"rank {who}: no memory"
    }
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize("who", RANKS)
def test_a_rank_that_never_comes_is_waited_for_a_bounded_time(store: Any, who: int) -> None:
    works = {RANKS[0]: writer(store, timeout_s=0.3), **{r: sender(store, r, timeout_s=0.3) for r in RANKS[1:]}}
    del works[who]
    began = time.monotonic()
    (message,) = messages(together(list(works.values())))
    assert "waited 0.3 s for the others" in message
    assert 0.3 <= time.monotonic() - began < 2.0


def test_a_rank_that_comes_after_the_others_gave_up_skips_at_once(store: Any) -> None:
    with pytest.raises(NotAgreed, match=r"waited 0\.1 s"):
        writer(store, timeout_s=0.1)()
    began = time.monotonic()
    with pytest.raises(NotAgreed, match=r"rank 3 waited 0\.1 s"):
        sender(store, RANKS[1])()
    assert time.monotonic() - began < 0.1


def test_the_writer_does_not_start_when_somebody_gave_up_after_being_ready(store: Any) -> None:
    for rank in RANKS[1:]:
        store.set(f"slime_instrument/0/0/sizes/{rank}", "1")
        store.add("slime_instrument/0/0/ready", 1)
    mine = agreement(store, RANKS[0])
    mine.gather_sizes()
    agreement(store, RANKS[2]).give_up("killed")
    with pytest.raises(NotAgreed, match="rank 8: killed"):
        mine.go()


def test_giving_up_after_the_start_changes_nothing_for_the_others(store: Any) -> None:
    together([writer(store), *(sender(store, rank) for rank in RANKS[1:])])
    agreement(store, RANKS[1]).give_up("too late")
    with pytest.raises(NotAgreed):  # a second writer would find all gone, and a decision that stands
        Agreement(store, "0/1", RANKS[0], RANKS, 0.05).gather_sizes()
    assert store.get("slime_instrument/0/0/decision") == b"go"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_timing_all_ranks_that_decide_decide_the_same(store: Any, seed: int) -> None:
    chance = random.Random(seed)

    def late(work: Callable[[], Any], delay: float) -> Callable[[], Any]:
        def run() -> Any:
            time.sleep(delay)
            return work()

        return run

    works = [writer(store, timeout_s=0.02), *(sender(store, rank, timeout_s=0.02) for rank in RANKS[1:])]
    if seed % 2:
        works.append(lambda: agreement(store, RANKS[1]).give_up("changed its mind"))
    results = together([late(work, chance.uniform(0, 0.03)) for work in works])[: len(RANKS)]
    skipped = [isinstance(result, NotAgreed) for result in results]
    assert len(set(skipped)) == 1, results


def test_dumps_with_different_keys_do_not_meet(store: Any) -> None:
    agreement(store, RANKS[1], key="0/0").give_up("first attempt")
    results = together([writer(store, key="0/1"), *(sender(store, rank, key="0/1") for rank in RANKS[1:])])
    assert not any(isinstance(result, Exception) for result in results)


def test_a_finished_dump_leaves_no_sizes_behind(store: Any) -> None:
    together([writer(store), *(sender(store, rank) for rank in RANKS[1:])])
    before = store.num_keys()
    agreement(store, RANKS[0]).forget()
    assert store.num_keys() <= before - len(RANKS)


class Broken:
    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any) -> Any:
            raise RuntimeError("the store is gone")

        return fail


def test_giving_up_never_raises_and_neither_does_forgetting() -> None:
    mine = agreement(Broken(), RANKS[0])
    mine.give_up("anything")
    mine.forget()


def test_the_wait_polls_with_growing_pauses_and_ends_on_time() -> None:
    clock, naps = [0.0], []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        clock[0] += seconds

    mine = Agreement(dist.HashStore(), "0/0", 3, RANKS, 10.0, clock=lambda: clock[0], sleep=sleep)
    with pytest.raises(NotAgreed, match="waited 10 s"):
        mine.gather_sizes()
    assert 10.0 <= clock[0] < 10.2
    assert naps[0] < 0.001
    assert max(naps) <= 0.05
    assert len(naps) < 1000


def test_ranks_that_did_not_announce_themselves_or_stepped_out_are_named(store: Any) -> None:
    assert not_armed(store, RANKS) == list(RANKS)
    for rank in RANKS:
        announce(store, rank)
    announce(store, RANKS[0])
    assert not_armed(store, RANKS) == []
    withdraw(store, RANKS[2])
    assert not_armed(store, RANKS) == [RANKS[2]]
