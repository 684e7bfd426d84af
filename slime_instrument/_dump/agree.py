"""Agree with the other ranks that a dump is made, through the job's key-value store, over a connection of our own.

There is one atomic decision for each call of the dump, "go" or "skip", that every rank obeys. Whoever gives up decides
"skip", and the others stop waiting at once. No group of training's is used.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from slime_instrument._dump.rank import Topology
from slime_instrument._errors import DumpError, describe, not_ours
from slime_instrument._settings import Pins, Settings, is_due

_ROOT = "slime_instrument"


class NotAgreed(DumpError):
    """The ranks do not dump this rollout; the message says why. No fault of the rank that hears it."""


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


# ---------------------------------------------------------------------------------------------------------------------
# Who is armed


class Presence:
    """This rank's connection to the job's store, and what the ranks say of themselves there.

    slime may destroy its process groups between rollouts and make others, with another store; :meth:`connect` follows.
    """

    def __init__(self, every: int = 1, pin: Pins | None = None) -> None:
        """``every`` and ``pin``: which rollouts this rank dumps."""
        self._dumps = json.dumps([every, () if pin is None else pin.ranges])
        self._dumps_of: dict[int, str] = {}
        self.store: Store | None = None
        self._of: Any = None
        self.rank = -1
        self._out: str | None = None

    def connect(self) -> Store:
        """The store of the default process group as it is now, with this rank announced in it."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        current = distributed_c10d._get_default_store()
        if self.store is None or current is not self._of:
            careful: Any = _Careful(_own_connection(current))
            self.store, self._of, self.rank = careful, current, dist.get_rank()
            self._say_what_is_dumped(self.store)
            self._announce(self.store)
        return self.store

    def _say_what_is_dumped(self, store: Store) -> None:
        self._dumps_of = {}
        store.set(f"{_ROOT}/dumps/{self.rank}", self._dumps)

    def _announce(self, store: Store) -> None:
        if self._out is None:
            store.set(f"{_ROOT}/armed/{self.rank}", "1")
        else:
            store.set(f"{_ROOT}/armed/{self.rank}", storable(f"out:{self._out}"))
            store.add(f"{_ROOT}/out", 1)

    @property
    def connected(self) -> bool:
        return self.store is not None

    def step_out(self, reason: str) -> None:
        """Say that nobody shall wait for this rank again, and why. Never raises."""
        self._out = reason
        if self.store is not None:
            try:
                self._announce(self.store)
            except Exception as error:
                if not_ours(error):
                    raise

    def skips(self, ranks: Sequence[int], rollout_id: int) -> list[int]:
        """Which of ``ranks`` do not dump this rollout, because their settings say so."""
        assert self.store is not None
        for rank in ranks:
            if rank not in self._dumps_of and self.store.check([f"{_ROOT}/dumps/{rank}"]):
                self._dumps_of[rank] = self.store.get(f"{_ROOT}/dumps/{rank}").decode()
        skips = []
        for rank in ranks:
            if self._dumps_of.get(rank, self._dumps) != self._dumps:
                every, ranges = json.loads(self._dumps_of[rank])
                pin = Pins(tuple((first, last) for first, last in ranges))
                if not is_due(Settings(every=every, pin=pin), rollout_id):
                    skips.append(rank)
        return skips

    def absent(self, ranks: Sequence[int]) -> str | None:
        """Which of ``ranks`` will not take part, with the reason each gave; None when all are there."""
        assert self.store is not None
        keys = {rank: f"{_ROOT}/armed/{rank}" for rank in ranks}
        if self.store.check(list(keys.values())) and not self.store.add(f"{_ROOT}/out", 0):
            return None  # two questions in the common case
        unarmed = [rank for rank, key in keys.items() if not self.store.check([key])]
        reasons = [f"rank(s) {unarmed} train without instrumentation"] if unarmed else []
        for rank in ranks:
            said = "1" if rank in unarmed else self.store.get(keys[rank]).decode()
            if said != "1":
                reasons.append(f"rank {rank} dumps no more ({said.removeprefix('out:')})")
        return "; ".join(reasons) or None


def storable(text: str) -> str:
    """``text`` as the store takes it: UTF-8 (paths need not be), and no message of a size that it refuses."""
    return text[:_MOST_STORED].encode(errors="backslashreplace").decode()


_MOST_STORED = 1 << 16


class _Careful:
    """A store whose failures are no fault of ours, whatever class it raises."""

    def __init__(self, store: Any) -> None:
        self.underlying_store = store
        for name in ("set", "get", "add", "check", "compare_set", "delete_key"):
            setattr(self, name, functools.partial(self._ask, name))

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self.underlying_store, name)(*arguments)
        except Exception as error:
            if not_ours(error):
                raise
            raise DumpError(f"the job's store does not answer: {describe(error)}") from error


def _own_connection(store: Any) -> Any:
    """Another connection to the same store, so that no wait of ours holds a lock of training's."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):  # older torch, or a store that cannot
        return store


# ---------------------------------------------------------------------------------------------------------------------
# Waiting


class Patience:
    """A bounded wait that says what it waits for. ``limit_s`` bounds the time since :meth:`moved` was last called.

    Only time that passed in here counts: a process that was stopped and continued has not been waiting.
    """

    _SAY_AFTER_S = 10.0

    def __init__(self, limit_s: float, what: Callable[[], str], say: Callable[[str], None]) -> None:
        self._limit_s, self._what, self._say = limit_s, what, say
        self._still_s = self.all_s = 0.0
        self._say_at_s = self._SAY_AFTER_S

    def moved(self) -> None:
        self._still_s = 0.0

    def step_s(self) -> float:
        """How long to wait next: short at first, so that what comes soon is noticed soon."""
        return min(max(self._still_s / 10, 0.0003), 0.05, self._limit_s)

    def waited(self, seconds: float, at_most: float) -> bool:
        """Count a wait that was meant to take ``at_most`` seconds. False once the bound is reached."""
        seconds = min(seconds, at_most + 0.05)
        self._still_s += seconds
        self.all_s += seconds
        if self.all_s >= self._say_at_s:
            self._say_at_s *= 2
            self._say(f"waiting for {self._what()} since {self.all_s:.0f} s")
        return self._still_s < self._limit_s


# ---------------------------------------------------------------------------------------------------------------------
# Agreeing


@dataclass(frozen=True)
class CallId:
    """What identifies one dump call on every rank: the rollout, how often it was trained before, and which call of the
    dump this is in it."""

    rollout_id: int
    attempt: int
    call: int

    def __str__(self) -> str:
        return f"{self.rollout_id}/{self.attempt}/{self.call}"


def give_up(store: Store, call: CallId, rank: int, reason: str) -> None:
    """Tell the others not to wait for ``rank``, or, once bytes travel, why they end. Never raises: it is called when
    something has failed already, and the others' bounded waits cover a store that is gone too."""
    text = storable(f"rank {rank}: {reason}")
    try:
        store.compare_set(f"{_ROOT}/{call}/decision", "", f"skip:{text}")
        store.compare_set(f"{_ROOT}/{call}/failed", "", text)
    except Exception as error:
        if not_ours(error):
            raise


_LOOK_S = 0.25
"""How often it is asked, during a wait, whether a rank has ended its training step without calling the dump."""


class Agreement:
    """One dump call's agreement among the participants of ``topology``.

    ``missed`` is kept by the caller over all calls: rank and number of the call in its rollout -> the call to which
    that rank did not come. Such a rank is not waited for again until it is seen to have come after all.
    """

    def __init__(
        self,
        store: Store,
        call: CallId,
        topology: Topology,
        timeout_s: float,
        missed: dict[tuple[int, int], CallId],
        say: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._call, self._topology = store, call, topology
        self._root = f"{_ROOT}/{call}"
        self._timeout_s, self._missed, self._say = timeout_s, missed, say
        self._sleep, self._clock = sleep, clock

    def give_up(self, reason: str) -> None:
        """See :func:`give_up`."""
        give_up(self._store, self._call, self._topology.rank, reason)

    def failure(self, within_s: float = 0.0) -> str | None:
        """Why a rank ended after "go"; None as far as is known. ``within_s``: how long to wait for a rank that closed
        its connection to say why."""
        until = self._clock() + within_s
        while True:
            try:
                if self._store.check([f"{self._root}/failed"]):
                    return self._store.get(f"{self._root}/failed").decode()
            except Exception as error:
                if not_ours(error):
                    raise
                return None
            if self._clock() >= until:
                return None
            self._sleep(0.02)

    def pass_by(self) -> None:
        """This rank's training step has ended and it called no dump: it may still, but nobody should count on it."""
        self._store.set(self._passed(self._topology.rank), "1")
        self._store.add(self._passed("count"), 1)

    def _passed(self, rank: int | str) -> str:
        return f"{_ROOT}/{self._call.rollout_id}/{self._call.attempt}/passed/{rank}"

    def arrive(self, template: str) -> None:
        """This rank has come, and would dump to ``template``, which :func:`storable` gave."""
        self._store.set(self._ready(self._topology.rank), template)
        if not self._topology.is_writer:
            self._store.add(f"{self._root}/count", 1)

    def wait_for_all(self) -> dict[int, str]:
        """The writer: wait until all others have come; returns their path templates. Raises :class:`NotAgreed`.

        Ranks that ended their training step without calling the dump, as a trainer of the user's may have it, are not
        among them.
        """
        others = [rank for rank in self._topology.participants if rank != self._topology.rank]
        self._skip_known_absent(others)

        def come() -> int:
            return self._store.add(f"{self._root}/count", 0)

        def come_or_passed_by() -> bool:
            # The first question is one message, however many ranks there are.
            there = come() + self._store.add(self._passed("count"), 0) >= len(others)
            return there and self._passed_by(self._lacking(others))

        if not self._wait(lambda: come() >= len(others), others, settled=come_or_passed_by):
            self._obey()
        lacking = self._lacking(others)
        return {rank: self._store.get(self._ready(rank)).decode() for rank in others if rank not in lacking}

    def go(self, address: Mapping[str, Any]) -> None:
        """The writer, once it could take everything: start. Raises :class:`NotAgreed` when somebody gave up."""
        self._decide("go:" + json.dumps(address))
        self._obey()

    def wait_for_go(self) -> dict[str, Any]:
        """A rank that sends: wait for the decision; returns where to send to. Raises :class:`NotAgreed`.

        The writer is waited for once; when it has come, it bounds the wait for the others itself.
        """
        writer = self._topology.writer
        self._skip_known_absent([writer])
        if self._wait(lambda: self._store.check([self._ready(writer)]), [writer], settled=self._without_a_writer):
            self._wait(lambda: False, [writer], self._timeout_s + 2)
        address: dict[str, Any] = json.loads(self._obey())
        return address

    def forget(self) -> None:
        """The writer, once everything has arrived: remove this call's keys. A store that cannot is left as it is."""
        keys = ["count", "decision", *(f"ready/{rank}" for rank in self._topology.participants)]
        for key in keys:
            try:
                self._store.delete_key(f"{self._root}/{key}")
            except (RuntimeError, NotImplementedError):
                return

    def _ready(self, rank: int, call: CallId | None = None) -> str:
        return f"{_ROOT}/{self._call if call is None else call}/ready/{rank}"

    def _skip_known_absent(self, ranks: Sequence[int]) -> None:
        """Decide "skip" at once where a rank missed the same call before, has not come to it since, and is not here."""
        for rank in ranks:
            missed = self._missed.get((rank, self._call.call))
            if missed is None:
                continue
            if self._store.check([self._ready(rank, missed)]) or self._store.check([self._ready(rank)]):
                del self._missed[rank, self._call.call]  # late, but it comes
            else:
                self._decide(
                    f"skip:rank {rank} did not come to the dump of rollout {missed.rollout_id} and is not waited for "
                    "again until it comes"
                )
                self._missed[rank, self._call.call] = self._call  # if it comes late to this one, it is back

    def _wait(
        self,
        condition: Callable[[], bool],
        ranks: Sequence[int],
        limit_s: float | None = None,
        settled: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Poll, so that the store stays free for training's own threads. False once there is a decision; one is made
        when the bound is reached. ``settled``: another reason to wait no longer, looked at now and then."""
        decision = f"{self._root}/decision"
        patience = Patience(limit_s or self._timeout_s, lambda: self._who_lacks(ranks), self._say)
        look_at_s = _LOOK_S / 4
        while True:
            began = self._clock()
            if self._store.check([decision]):
                return False
            if condition():
                return True
            if patience.all_s >= look_at_s:
                look_at_s = patience.all_s + _LOOK_S
                if settled():
                    return True
            step = patience.step_s()
            self._sleep(step)
            # A store that answers slowly is part of the wait.
            if not patience.waited(self._clock() - began, step + min(1.0, self._timeout_s / 4)):
                break
        lacking = self._lacking(ranks)
        for rank in lacking:
            self._missed[rank, self._call.call] = self._call
        late = f"rank(s) {lacking} did not come" if lacking else f"rank(s) {list(ranks)} came but decided nothing"
        self._decide(f"skip:{late} within {limit_s or self._timeout_s:g} s (rank {self._topology.rank} waited)")
        return False

    def _passed_by(self, ranks: Sequence[int]) -> bool:
        """Whether all of ``ranks`` ended their training step without calling the dump, and this rank did not: where
        the dump is called after that step, they are only about to come."""
        passed = bool(ranks) and all(self._store.check([self._passed(rank)]) for rank in ranks)
        return passed and not self._store.check([self._passed(self._topology.rank)])

    def _without_a_writer(self) -> bool:
        """Give up at once where the writer ended its training step without calling the dump."""
        writer = self._topology.writer
        if self._passed_by([writer]):
            self._decide(f"skip:rank {writer} ended its train_actor without calling the dump, whose file it writes")
            return True
        return False

    def _lacking(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not self._store.check([self._ready(rank)])]

    def _who_lacks(self, ranks: Sequence[int]) -> str:
        return f"rank(s) {self._lacking(ranks) or list(ranks)}"

    def _decide(self, decision: str) -> None:
        self._store.compare_set(f"{self._root}/decision", "", storable(decision))

    def _obey(self) -> str:
        kind, _, rest = self._store.get(f"{self._root}/decision").decode().partition(":")
        if kind != "go":
            raise NotAgreed(rest)
        return rest
