"""The ranks of a dump, and how they agree that it is made: through the job's key-value store, over a connection of our
own.

There is one atomic decision for each call of the dump, "go" or "skip", that every rank obeys. Whoever gives up decides
"skip", and the others stop waiting at once. Training's process groups are not used. torch is not imported at module
level, because the hooks import this module before slime is imported.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from slime_instrument._errors import DumpError, contained, describe, not_ours
from slime_instrument._settings import Pins, Settings, is_due

if TYPE_CHECKING:
    import torch

_ROOT = "slime_instrument"
PARALLEL_STATE = "megatron.core.parallel_state"


class NotAgreed(DumpError):
    """The ranks do not dump this rollout; the message says why. No fault of the rank that hears it."""


# ---------------------------------------------------------------------------------------------------------------------
# This rank


@dataclass(frozen=True)
class Topology:
    """This rank's place. ``participants`` are the global ranks that hold a part of the dump, in Megatron's order: one
    per data- and context-parallel rank, on the last pipeline stage, at tensor-parallel rank 0. The first writes."""

    rank: int
    tensor_parallel: int
    tensor_rank: int
    pipeline_parallel: int
    context_parallel: int
    context_rank: int
    data_parallel: int
    data_rank: int
    last_stage: bool
    participants: tuple[int, ...]

    @property
    def takes_part(self) -> bool:
        """Tensor-parallel ranks hold the same token values, and earlier stages none of the computed ones."""
        return self.last_stage and self.tensor_rank == 0

    @property
    def writer(self) -> int:
        return self.participants[0]

    @property
    def is_writer(self) -> bool:
        return self.takes_part and self.rank == self.writer

    def sizes(self) -> dict[str, int]:
        names = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")
        return {name: getattr(self, name) for name in names}


def megatron_is_up() -> bool:
    """Whether this process trains with Megatron groups. Imports nothing."""
    state: Any = sys.modules.get(PARALLEL_STATE)
    return state is not None and bool(state.model_parallel_is_initialized())


def read_topology() -> Topology:
    """This rank's place as Megatron has it now; no communication."""
    import torch.distributed as dist

    state: Any = sys.modules[PARALLEL_STATE]
    group = state.get_data_parallel_group(with_context_parallel=True)
    return Topology(
        rank=dist.get_rank(),
        tensor_parallel=state.get_tensor_model_parallel_world_size(),
        tensor_rank=state.get_tensor_model_parallel_rank(),
        pipeline_parallel=state.get_pipeline_model_parallel_world_size(),
        context_parallel=state.get_context_parallel_world_size(),
        context_rank=state.get_context_parallel_rank(),
        data_parallel=state.get_data_parallel_world_size(with_context_parallel=False),
        data_rank=state.get_data_parallel_rank(with_context_parallel=False),
        # Virtual stages are ignored: the last physical stage holds the last virtual one.
        last_stage=state.is_pipeline_last_stage(ignore_virtual=True),
        participants=tuple(dist.get_process_group_ranks(group)),
    )


@dataclass(frozen=True)
class Seen:
    """What this rank's hooks know of the rollout that is dumped.

    Attributes:
        failure: why a part of this rollout is missing, where one is; its dump is refused then.
        log_probs: captured log-probs by local sample, shape ``(local response tokens,)`` each; None for a sample that
            the loss never saw. None as a whole where nothing was captured.
        optimizer_steps: by local sample, the optimizer step of the rollout at which it was captured.
        came_with_rollout: fields that ``rollout_data`` held when training began.
        captured_by_slime: slime itself added log-probs of the training forward (since #2266).
        positions_from: "partition", "reconstructed" or "unknown".
        route: how this process was armed, in words.
        why_no_log_probs: why ``log_probs`` is absent, for the provenance; looked at only where it is.
        weight_version: the trainer's own count of weight updates, where it has one.
        step_results: of each optimizer step its number, slime's dict of losses, and the gradient's norm.
    """

    failure: str | None = None
    log_probs: Sequence[torch.Tensor | None] | None = None
    optimizer_steps: Sequence[int | None] | None = None
    came_with_rollout: frozenset[str] = frozenset()
    captured_by_slime: bool = False
    positions_from: str = "unknown"
    route: str = ""
    why_no_log_probs: str = ""
    weight_version: int | None = None
    step_results: Sequence[tuple[int | None, Any, Any]] = ()


# ---------------------------------------------------------------------------------------------------------------------
# The job's store, and who is armed


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


class _Careful:
    """A store whose failures are no fault of ours, whatever class it raises."""

    def __init__(self, store: Any) -> None:
        self.underlying_store = store
        self.broken = False
        """Whether an answer was an error: another connection may get better ones."""

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self.underlying_store.set(key, value))

    def get(self, key: str) -> bytes:
        return bytes(self._ask(lambda: self.underlying_store.get(key)))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask(lambda: self.underlying_store.add(key, amount)))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask(lambda: self.underlying_store.check(keys)))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return bytes(self._ask(lambda: self.underlying_store.compare_set(key, expected, desired)))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(lambda: self.underlying_store.delete_key(key)))

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except Exception as error:
            if not_ours(error):
                raise
            self.broken = True
            raise DumpError(f"the job's store does not answer: {describe(error)}") from error


def innermost(store: Any) -> Any:
    """The store that a store with a prefix, or a careful one, asks in the end."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _listens(store: Any) -> bool:
    """Whether somebody is there where ``store`` has its server; True for one that has none, such as a file."""
    store = innermost(store)
    if not hasattr(store, "port"):
        return True
    try:
        socket.create_connection((store.host, store.port), timeout=2.0).close()
    except OSError:
        return False
    return True


def _weakly(store: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(store)
    except TypeError:  # a class of the user's may not allow it
        return lambda: store


def storable(text: str) -> str:
    """``text`` as the store takes it: UTF-8 (paths need not be), and no message of a size that it refuses."""
    return text[: 1 << 16].encode(errors="backslashreplace").decode()


class Presence:
    """This rank's connection to the job's store, and what the ranks say of themselves there.

    slime may destroy its process groups between rollouts and make others, with another store; :meth:`connect` follows.
    """

    def __init__(self, every: int = 1, pin: Pins | None = None) -> None:
        """``every`` and ``pin``: which rollouts this rank dumps."""
        self._dumps = json.dumps([every, () if pin is None else pin.ranges])
        self._dumps_of: dict[int, str] = {}
        self.store: _Careful | None = None
        self._of: Callable[[], Any] = lambda: None
        """The job's store that ``store`` is another connection to. Held weakly: where a job makes a new one at the same
        address, the old one's server must be able to end."""
        self.rank = -1
        self._out: str | None = None

    def connect(self) -> Store:
        """The store of the default process group as it is now, with this rank announced in it. Raises
        :class:`DumpError` where it does not answer."""
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        try:
            current: Any = distributed_c10d._get_default_store()
            if self.store is not None and current is self._of():
                if not self.store.broken:
                    return self.store
                if not _listens(current):
                    raise DumpError("the job's store takes no connection")  # cloning would wait for it, for minutes
            try:
                own = current.clone()  # another connection, so that no wait of ours holds a lock of training's
            except (AttributeError, RuntimeError, NotImplementedError):  # a store that cannot
                own = current
            self.store, self._of = _Careful(own), _weakly(current)
            self._announce(self.store, dist.get_rank())
        except DumpError:
            raise
        except RuntimeError as error:  # what torch's stores raise
            raise DumpError(f"the job's store does not answer: {describe(error)}") from error
        return self.store

    def _announce(self, store: Store, rank: int) -> None:
        """That this rank takes part, and in what."""
        self._dumps_of, self.rank = {}, rank
        store.set(f"{_ROOT}/dumps/{rank}", self._dumps)
        self._say_whether_armed(store)

    def _say_whether_armed(self, store: Store) -> None:
        store.set(f"{_ROOT}/armed/{self.rank}", "1" if self._out is None else storable(f"out:{self._out}"))
        if self._out is not None:
            store.add(f"{_ROOT}/out", 1)

    def step_out(self, reason: str) -> None:
        """Say that nobody shall wait for this rank again, and why. Never raises."""
        self._out = reason
        if self.store is not None:
            with contained():
                self._say_whether_armed(self.store)

    def skips(self, ranks: Sequence[int], rollout_id: int) -> list[int]:
        """Which of ``ranks`` do not dump this rollout, because their settings say so."""
        store, skips = self.store or self.connect(), []
        for rank in ranks:
            if rank not in self._dumps_of and store.check([f"{_ROOT}/dumps/{rank}"]):
                self._dumps_of[rank] = store.get(f"{_ROOT}/dumps/{rank}").decode()
            if self._dumps_of.get(rank, self._dumps) != self._dumps:
                every, ranges = json.loads(self._dumps_of[rank])
                pin = Pins(tuple((first, last) for first, last in ranges))
                if not is_due(Settings(every=every, pin=pin), rollout_id):
                    skips.append(rank)
        return skips

    def absent(self, ranks: Sequence[int]) -> str | None:
        """Which of ``ranks`` will not take part, with the reason each gave; None when all are there."""
        store = self.store or self.connect()
        keys = {rank: f"{_ROOT}/armed/{rank}" for rank in ranks}
        if store.check(list(keys.values())) and not store.add(f"{_ROOT}/out", 0):
            return None  # two questions in the common case
        unarmed = [rank for rank, key in keys.items() if not store.check([key])]
        reasons = [f"rank(s) {unarmed} train without instrumentation"] if unarmed else []
        for rank in ranks:
            said = "1" if rank in unarmed else store.get(keys[rank]).decode()
            if said != "1":
                reasons.append(f"rank {rank} dumps no more ({said.removeprefix('out:')})")
        return "; ".join(reasons) or None


# ---------------------------------------------------------------------------------------------------------------------
# Agreeing


class Patience:
    """A bounded wait that says what it waits for. ``limit_s`` bounds the time since :meth:`moved` was last called.

    Only time that passed in here counts: a process that was stopped and continued has not been waiting.
    """

    def __init__(self, limit_s: float, what: Callable[[], str], say: Callable[[str], None]) -> None:
        self._limit_s, self._what, self._say = limit_s, what, say
        self._still_s = self.all_s = 0.0
        self._say_at_s = 10.0

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
    """Tell the others not to wait for ``rank``, or, once bytes travel, why they end. Never raises and soon returns: it
    is called when something has failed already. The bounded waits of the others cover a store that is gone."""
    text = storable(f"rank {rank}: {reason}")

    def tell() -> None:
        with contained():
            store.compare_set(f"{_ROOT}/{call}/decision", "", f"skip:{text}")
            store.compare_set(f"{_ROOT}/{call}/failed", "", text)

    # A question has no timeout, and while the store's process is stopped or unreachable there is no answer. An
    # exception that ends the training must still get out.
    thread = threading.Thread(target=tell, name="slime_instrument-give-up", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be had, such as while the interpreter ends
        tell()
    else:
        thread.join(_TELLING_S)


_TELLING_S = 5.0
"""How long something that failed is held up at most to tell the others."""


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
    ) -> None:
        self.store, self.topology, self.timeout_s = store, topology, timeout_s
        self._call, self._missed, self._say = call, missed, say
        self._root = f"{_ROOT}/{call}"

    def patience(self, what: Callable[[], str], limit_s: float | None = None) -> Patience:
        """For one wait of this dump."""
        return Patience(limit_s or self.timeout_s, what, self._say)

    def give_up(self, reason: str) -> None:
        """See :func:`give_up`."""
        give_up(self.store, self._call, self.topology.rank, reason)

    def failure(self, within_s: float = 0.0) -> str | None:
        """Why a rank ended after "go"; None as far as is known. ``within_s``: how long to wait for a rank that closed
        its connection to say why."""
        until = time.monotonic() + within_s
        while True:
            try:
                if self.store.check([f"{self._root}/failed"]):
                    return self.store.get(f"{self._root}/failed").decode()
            except Exception as error:
                if not_ours(error):
                    raise
                return None
            if time.monotonic() >= until:
                return None
            time.sleep(0.02)

    def pass_by(self) -> None:
        """This rank's training step has ended and it called no dump: it may still, but nobody should count on it."""
        self.store.set(self._passed(self.topology.rank), "1")
        self.store.add(self._passed("count"), 1)

    def arrive(self, template: str) -> None:
        """This rank has come, and would dump to ``template``, which :func:`storable` gave."""
        self.store.set(self._ready(self.topology.rank), template)
        if not self.topology.is_writer:
            self.store.add(f"{self._root}/count", 1)

    def wait_for_all(self) -> dict[int, str]:
        """The writer: wait until all others have come; returns their path templates. Raises :class:`NotAgreed`.

        Ranks that ended their training step without calling the dump, as a trainer of the user's may have it, are not
        among them.
        """
        others = [rank for rank in self.topology.participants if rank != self.topology.rank]
        self._skip_known_absent(others)

        def come() -> int:
            return self.store.add(f"{self._root}/count", 0)

        def come_or_passed_by() -> bool:
            # The first question is one message, however many ranks there are.
            there = come() + self.store.add(self._passed("count"), 0) >= len(others)
            return there and self._passed_by(self._lacking(others))

        if not self._wait(lambda: come() >= len(others), others, settled=come_or_passed_by):
            self._obey()
        lacking = self._lacking(others)
        return {rank: self.store.get(self._ready(rank)).decode() for rank in others if rank not in lacking}

    def go(self, address: Mapping[str, Any]) -> None:
        """The writer, once it could take everything: start. Raises :class:`NotAgreed` when somebody gave up."""
        self._decide("go:" + json.dumps(address))
        self._obey()

    def wait_for_go(self) -> dict[str, Any]:
        """A rank that sends: wait for the decision; returns where to send to. Raises :class:`NotAgreed`.

        The writer is waited for once; when it has come, it bounds the wait for the others itself.
        """
        writer = self.topology.writer
        self._skip_known_absent([writer])

        def without_a_writer() -> bool:
            if not self._passed_by([writer]):
                return False
            self._decide(f"skip:rank {writer} ended its train_actor without calling the dump, whose file it writes")
            return True

        if self._wait(lambda: self.store.check([self._ready(writer)]), [writer], settled=without_a_writer):
            self._wait(lambda: False, [writer], self.timeout_s + 2)
        address: dict[str, Any] = json.loads(self._obey())
        return address

    def forget(self) -> None:
        """The writer, once everything has arrived: remove this call's keys. A store that cannot is left as it is."""
        keys = ["count", "decision", *(f"ready/{rank}" for rank in self.topology.participants)]
        for key in keys:
            try:
                self.store.delete_key(f"{self._root}/{key}")
            except (RuntimeError, NotImplementedError):
                return

    def _ready(self, rank: int, call: CallId | None = None) -> str:
        return f"{_ROOT}/{self._call if call is None else call}/ready/{rank}"

    def _passed(self, rank: int | str) -> str:
        return f"{_ROOT}/{self._call.rollout_id}/{self._call.attempt}/passed/{rank}"

    def _skip_known_absent(self, ranks: Sequence[int]) -> None:
        """Decide "skip" at once where a rank missed the same call before, has not come to it since, and is not here."""
        for rank in ranks:
            missed = self._missed.get((rank, self._call.call))
            if missed is None:
                continue
            if self.store.check([self._ready(rank, missed)]) or self.store.check([self._ready(rank)]):
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
        patience = self.patience(lambda: f"rank(s) {self._lacking(ranks) or list(ranks)}", limit_s)
        look_at_s = _LOOK_S / 4
        while True:
            began = time.monotonic()
            if self.store.check([f"{self._root}/decision"]):
                return False
            if condition():
                return True
            if patience.all_s >= look_at_s:
                look_at_s = patience.all_s + _LOOK_S
                if settled():
                    return True
            step = patience.step_s()
            time.sleep(step)
            # A store that answers slowly is part of the wait.
            if not patience.waited(time.monotonic() - began, step + min(1.0, self.timeout_s / 4)):
                break
        lacking = self._lacking(ranks)
        for rank in lacking:
            self._missed[rank, self._call.call] = self._call
        late = f"rank(s) {lacking} did not come" if lacking else f"rank(s) {list(ranks)} came but decided nothing"
        self._decide(f"skip:{late} within {limit_s or self.timeout_s:g} s (rank {self.topology.rank} waited)")
        return False

    def _passed_by(self, ranks: Sequence[int]) -> bool:
        """Whether all of ``ranks`` ended their training step without calling the dump, and this rank did not: where
        the dump is called after that step, they are only about to come."""
        passed = bool(ranks) and all(self.store.check([self._passed(rank)]) for rank in ranks)
        return passed and not self.store.check([self._passed(self.topology.rank)])

    def _lacking(self, ranks: Sequence[int]) -> list[int]:
        return [rank for rank in ranks if not self.store.check([self._ready(rank)])]

    def _decide(self, decision: str) -> None:
        self.store.compare_set(f"{self._root}/decision", "", storable(decision))

    def _obey(self) -> str:
        kind, _, rest = self.store.get(f"{self._root}/decision").decode().partition(":")
        if kind != "go":
            raise NotAgreed(rest)
        return rest
