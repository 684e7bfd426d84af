"""Before anything is sent, the ranks agree that all are ready. Nobody waits for a rank that gave up.

The agreement goes through the job's key-value store, not through a collective: a collective that times out leaves its
process group broken for the training that follows, and a store takes a bounded wait. Every rank is told the same
decision, because it is made by one atomic compare-and-set: whoever gives up or runs out of time tries to decide
"skip", the writer tries to decide "go", and the first one wins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

__all__ = ["Agreement", "NotAgreed", "Store", "announce", "default_store", "not_armed", "withdraw"]

GO, SKIP = "go", "skip:"
_ROOT = "slime_instrument"


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


class NotAgreed(Exception):
    """The ranks do not dump this rollout; the message says why."""


def default_store() -> Any:
    """The store of the default process group; it outlives groups that are destroyed and rebuilt."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def announce(store: Store, rank: int) -> None:
    """Say that this rank is armed; done before training, so that at the dump everybody can know without waiting."""
    store.set(f"{_ROOT}/armed/{rank}", "1")


def withdraw(store: Store, rank: int) -> None:
    """Take the announcement back: this rank steps out, and nobody shall wait for it again."""
    store.delete_key(f"{_ROOT}/armed/{rank}")


def not_armed(store: Store, ranks: Sequence[int]) -> list[int]:
    """Ranks that have not announced themselves, or stepped out. After a training step, in which all of them took part,
    these are ranks without instrumentation."""
    keys = {rank: f"{_ROOT}/armed/{rank}" for rank in ranks}
    if store.check(list(keys.values())):  # one question in the common case
        return []
    return [rank for rank, key in keys.items() if not store.check([key])]


class Agreement:
    """One dump's agreement among ``ranks``; ``dump_key`` must be the same on all of them and new for each dump."""

    def __init__(
        self,
        store: Store,
        dump_key: str,
        rank: int,
        ranks: Sequence[int],
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store, self._root, self._rank, self._ranks = store, f"{_ROOT}/{dump_key}", rank, ranks
        self._timeout_s, self._clock, self._sleep = timeout_s, clock, sleep

    def give_up(self, reason: str) -> None:
        """Tell the others not to wait. Never raises: it is called when something has failed already."""
        try:
            self._decide(f"{SKIP}rank {self._rank}: {reason}")
        except Exception:  # the others' bounded wait covers a store that is gone too
            return

    def ready(self, sizes: str) -> None:
        """A rank that sends: publish what the writer must know, then wait for the decision. Raises NotAgreed."""
        self._store.set(f"{self._root}/sizes/{self._rank}", sizes)
        self._store.add(f"{self._root}/ready", 1)
        self._obey(self._wait_for(lambda: self._store.check([f"{self._root}/decision"])))

    def gather_sizes(self) -> dict[int, str]:
        """The writer: wait until all others are ready; returns what they published. Raises NotAgreed."""
        others = [rank for rank in self._ranks if rank != self._rank]
        in_time = self._wait_for(
            lambda: (
                self._store.check([f"{self._root}/decision"])
                or self._store.add(f"{self._root}/ready", 0) == len(others)
            )
        )
        if not in_time or self._store.check([f"{self._root}/decision"]):
            self._obey(in_time)
        return {rank: self._store.get(f"{self._root}/sizes/{rank}").decode() for rank in others}

    def go(self) -> None:
        """The writer, once it could take everything: start. Raises NotAgreed when somebody gave up meanwhile."""
        self._decide(GO)
        self._obey(True)

    def spoil(self, reason: str) -> None:
        """A sender that fails after "go": what it still sends is worth nothing. Known before its next byte is sent,
        because a compare-and-set is answered."""
        self._store.compare_set(f"{self._root}/spoilt", "", f"rank {self._rank}: {reason}")

    def refuse_spoilt(self) -> None:
        """The writer, once everything arrived. Raises NotAgreed when a sender failed meanwhile."""
        if self._store.check([f"{self._root}/spoilt"]):
            raise NotAgreed(self._store.get(f"{self._root}/spoilt").decode())

    def forget(self) -> None:
        """Remove this dump's keys; the writer does so once everything arrived. A store that cannot is left as it is."""
        for key in ["ready", "decision", *(f"sizes/{rank}" for rank in self._ranks if rank != self._rank)]:
            try:
                self._store.delete_key(f"{self._root}/{key}")
            except (RuntimeError, NotImplementedError):
                return

    def _decide(self, decision: str) -> None:
        self._store.compare_set(f"{self._root}/decision", "", decision)

    def _obey(self, decided: bool) -> None:
        if not decided:
            self._decide(f"{SKIP}rank {self._rank} waited {self._timeout_s:g} s for the others")
        decision = self._store.get(f"{self._root}/decision").decode()
        if decision != GO:
            raise NotAgreed(decision[len(SKIP) :])

    def _wait_for(self, condition: Callable[[], bool]) -> bool:
        """Poll, so that the store stays free for the training's own threads; False after the bounded time.

        The pauses grow with the wait, so that what is waited for is noticed at most a tenth of the wait too late.
        """
        began = self._clock()
        while not condition():
            waited = self._clock() - began
            if waited >= self._timeout_s:
                return False
            self._sleep(min(max(waited / 10, 0.0003), 0.05))
        return True
