"""Agree that all ranks are ready, then bring every rank's bytes to the writer. Nothing here touches training's groups.

Agreeing goes through the job's key-value store, over a connection of our own: one atomic decision, "go" or "skip", that
every rank obeys. Whoever gives up decides "skip" and the others stop waiting at once.

Bytes travel over sockets of our own between each rank and the writer. A collective that times out would leave its
process group broken for training, and messages on a group of training's could meet the user's own. Here whatever goes
wrong ends with a closed socket, which the other end sees at once.

Two things are bounded, and neither depends on the size of the dump: the wait until all ranks are ready, and standing
still, that is the time in which not one byte moved.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import pickle
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slime_instrument._dump.contribute import Contribution, Description
from slime_instrument._dump.rank import Topology
from slime_instrument._dump.zigzag import Restoring, Sink, bytes_of
from slime_instrument._errors import DumpError, describe, not_ours
from slime_instrument._settings import Pins, Settings, is_due

logger = logging.getLogger("slime_instrument")

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


# ---------------------------------------------------------------------------------------------------------------------
# Bytes. A connection carries, from the sender: token, rank, length of the description, the description, the payload;
# from the writer: the token's second half, then single bytes as signs of life until it closes.

_HELLO = struct.Struct("!16sIQ")
_CHUNK = 1 << 20
_ALIVE = b"."


def send(
    contribution: Contribution,
    address: Mapping[str, Any],
    agreement: Agreement,
    topology: Topology,
    timeout_s: float,
    bucket_bytes: int,
    say: Callable[[str], None],
) -> int:
    """A rank that does not write: send its own part. Returns the number of bytes. Raises :class:`DumpError`."""
    description = contribution.description.encode()
    patience = Patience(timeout_s, lambda: f"rank {topology.writer} to take bytes", say)
    total = left = len(description) + contribution.nbytes
    with _connect(address, topology, len(description), timeout_s) as line:
        try:
            for piece in _outgoing(description, contribution, bucket_bytes):
                _send_piece(line, piece, patience)
                left -= len(piece)
            line.shutdown(socket.SHUT_WR)
            # Closing with signs of life unread would reset the connection, and bytes under way would be lost.
            while _receive_some(line, patience):
                pass
        except OSError as error:
            if left:
                why = agreement.failure(within_s=0.5) or describe(error)
                raise DumpError(f"rank {topology.writer} took no more bytes: {why}") from None
        except _StoodStill:
            if left:  # with everything sent, it is the writer's to say whether there is a dump
                raise DumpError(f"rank {topology.writer} took no byte for {timeout_s:g} s") from None
    return total


def receive(
    contribution: Contribution,
    listener: Listener,
    agreement: Agreement,
    topology: Topology,
    cp_fields: Sequence[str],
    timeout_s: float,
    say: Callable[[str], None],
) -> list[Restoring]:
    """The writer: everybody's part put together, its own among them, by data-parallel rank.

    Bytes are taken from whichever rank has some, so that a slow one holds up nobody. Raises :class:`DumpError` naming
    the ranks that stood still or ended early.
    """
    lines = _Lines(listener, topology, agreement, timeout_s, say)
    with lines:
        others = lines.descriptions()
        own = contribution.description
        restoring, sinks = _plan([own, *others], topology.context_parallel, cp_fields)
        feed_own(contribution, sinks[own.rank], lines.keep_alive)
        lines.payload(sinks)
    for one in restoring:
        one.finish()
    return restoring


def put_together(contributions: Sequence[Contribution], cp: int, cp_fields: Sequence[str]) -> list[Restoring]:
    """The parts of ranks that are all in this process, by data-parallel rank. ``cp``: context-parallel size."""
    restoring, sinks = _plan([one.description for one in contributions], cp, cp_fields)
    for one in contributions:
        feed_own(one, sinks[one.description.rank])
    for part in restoring:
        part.finish()
    return restoring


def feed_own(contribution: Contribution, sink: Sink, meanwhile: Callable[[], None] = lambda: None) -> None:
    """The writer's own bytes; ``meanwhile`` is called between pieces."""
    for piece in contribution.pieces(_CHUNK):
        sink.feed(bytes_of(piece))
        meanwhile()


def _plan(
    descriptions: Sequence[Description], cp: int, cp_fields: Sequence[str]
) -> tuple[list[Restoring], dict[int, Sink]]:
    by_data_rank: dict[int, dict[int, Description]] = {}
    for one in descriptions:
        by_data_rank.setdefault(one.data_rank, {})[one.context_rank] = one
    for data_rank, parts in by_data_rank.items():
        if len(parts) < cp:
            lacking = sorted(set(range(cp)) - set(parts))
            raise DumpError(f"of data-parallel rank {data_rank} the parts of context-parallel rank(s) {lacking} lack")
    restoring = {rank: Restoring(by_data_rank[rank], cp, cp_fields) for rank in sorted(by_data_rank)}
    sinks = {one.rank: restoring[one.data_rank].sink(one.context_rank) for one in descriptions}
    return list(restoring.values()), sinks


class _StoodStill(Exception):
    """No byte moved for as long as is allowed."""


def _outgoing(description: bytes, contribution: Contribution, bucket_bytes: int) -> Iterator[memoryview]:
    yield memoryview(description)
    for piece in contribution.pieces(bucket_bytes):
        yield bytes_of(piece)


def _send_piece(line: socket.socket, piece: memoryview, patience: Patience) -> None:
    while piece:
        try:
            piece = piece[line.send(piece) :]
            patience.moved()
        except BlockingIOError:
            _wait_until(line, patience, writing=True)


def _receive_some(line: socket.socket, patience: Patience) -> bytes:
    """What has come; b"" at the end."""
    while True:
        try:
            data = line.recv(_CHUNK)
        except BlockingIOError:
            _wait_until(line, patience, writing=False)
            continue
        patience.moved()
        return data


def _wait_until(line: socket.socket, patience: Patience, *, writing: bool) -> None:
    """Until the socket can be written to or read from. A sign of life of the writer counts as movement: other ranks
    may have its attention."""
    poll = select.poll()  # select() itself ends at 1,024 open files
    poll.register(line, select.POLLIN | (select.POLLOUT if writing else 0))
    while True:
        step, began = max(patience.step_s(), 0.01), time.monotonic()
        ready = sum(event for _, event in poll.poll(step * 1000))
        if ready & select.POLLOUT or (ready and not writing):
            return
        if ready:
            if not line.recv(4096):
                raise ConnectionError(errno.ECONNRESET, "the writer closed the connection")
            patience.moved()
        elif not patience.waited(time.monotonic() - began, step):
            raise _StoodStill


class Listener:
    """Where the writer takes connections; :attr:`address` is what the others must know."""

    def __init__(self, store: Any) -> None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        try:
            self.socket = socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
        except OSError:
            try:
                self.socket = socket.create_server(("", 0))
            except OSError as error:
                raise DumpError(f"no socket can be had: {describe(error)}") from error
        self.socket.setblocking(False)
        self.token, self.answer = secrets.token_bytes(16), secrets.token_bytes(16)
        self.address = {
            "hosts": _hosts(store),
            "port": self.socket.getsockname()[1],
            "machine": _machine(),
            "token": self.token.hex(),
            "answer": self.answer.hex(),
        }

    def close(self) -> None:
        self.socket.close()


def _hosts(store: Any) -> list[str]:
    """Addresses of this machine, the likeliest first: of the interface that the user named for gloo or NCCL, the one
    that leads to the job's store, and what the machine's name resolves to, as gloo itself does."""
    hosts = [_of_interface(name) for name in _named_interfaces()]
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    for host in (getattr(store, "host", None), os.environ.get("MASTER_ADDR")):
        hosts.append(_towards(host) if isinstance(host, str) and host else None)
    hosts += _of_this_machines_name(socket.gethostname())
    return list(dict.fromkeys(host for host in hosts if host))


@functools.lru_cache(maxsize=1)
def _of_this_machines_name(name: str) -> list[str]:
    """Asked once: a resolver that does not answer takes many seconds."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the latter: a name that no address can have
        return []
    return [str(entry[4][0]) for entry in found]


def _named_interfaces() -> list[str]:
    named = [os.environ.get(f"{library}_SOCKET_IFNAME", "") for library in ("GLOO", "NCCL")]
    names = [name.strip().lstrip("=") for value in named for name in value.split(",")]
    return [name for name in names if name and not name.startswith("^")]


def _of_interface(name: str) -> str | None:
    """The IPv4 address of a network interface of this machine."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            request = struct.pack("256s", name.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
    except (ImportError, OSError):
        return None


def _towards(host: str) -> str | None:
    """The address that this machine has on the way to ``host``. Sends nothing."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def _machine() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def _connect(address: Mapping[str, Any], topology: Topology, description: int, timeout_s: float) -> socket.socket:
    """A connection to the writer, after both have shown that they mean each other."""
    hosts = list(address["hosts"])
    if address["machine"] == _machine():
        hosts = ["127.0.0.1", "::1", *hosts]
    hello = _HELLO.pack(bytes.fromhex(address["token"]), topology.rank, description)
    tried = []
    for host in dict.fromkeys(hosts):
        try:
            line = socket.create_connection((host, address["port"]), timeout=min(timeout_s, 5.0))
        except OSError as error:
            tried.append(f"{host}: {error.strerror or error}")
            continue
        try:
            line.sendall(hello)
            line.settimeout(timeout_s)
            if _exactly(line, 16) == bytes.fromhex(address["answer"]):
                line.setblocking(False)
                return line
            tried.append(f"{host}: somebody else answers")
        except OSError as error:
            tried.append(f"{host}: {error.strerror or error}")
        except BaseException:
            line.close()
            raise
        line.close()
    raise DumpError(
        f"rank {topology.writer} cannot be reached at port {address['port']} ({'; '.join(tried)}); "
        "GLOO_SOCKET_IFNAME names the interface to use"
    )


def _exactly(line: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = line.recv(count - len(data))
        if not more:
            break
        data += more
    return data


def _close(line: socket.socket) -> None:
    """End the connection itself: a child that was forked meanwhile holds the socket, too."""
    with contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
    line.close()


@dataclass(eq=False)
class _Line:
    """One sender's connection, as the writer sees it."""

    socket: socket.socket
    patience: Patience
    rank: int = -1
    head: bytearray = field(default_factory=bytearray)
    expected: int = _HELLO.size


class _Lines:
    """The writer's connections: all descriptions first, because together they decide where each byte belongs."""

    def __init__(
        self,
        listener: Listener,
        topology: Topology,
        agreement: Agreement,
        timeout_s: float,
        say: Callable[[str], None],
    ) -> None:
        self._listener, self._agreement = listener, agreement
        self._timeout_s, self._say = timeout_s, say
        self._others = {rank for rank in topology.participants if rank != topology.rank}
        self._by_rank: dict[int, _Line] = {}
        self._selector = selectors.DefaultSelector()
        self._arrivals = Patience(timeout_s, lambda: f"rank(s) {self._not_here()} to connect", say)
        self._signed = time.monotonic()
        self._asked = 0.0

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        for key in list((self._selector.get_map() or {}).values()):
            if isinstance(key.data, _Line):
                _close(key.data.socket)
        for line in self._by_rank.values():
            _close(line.socket)
        self._selector.close()
        self._listener.close()

    def descriptions(self) -> list[Description]:
        """Of all other participants."""
        self._selector.register(self._listener.socket, selectors.EVENT_READ, None)
        found: dict[int, Description] = {}
        while len(found) < len(self._others):
            for line in self._ready([self._arrivals] if self._not_here() else []):
                description = self._take_head(line)
                if description is not None:
                    found[line.rank] = description
        for key in list(self._selector.get_map().values()):  # who has connected and said nothing
            if key.data is not None:
                self._drop(key.data)
        self._selector.unregister(self._listener.socket)
        return [found[rank] for rank in sorted(found)]

    def payload(self, sinks: Mapping[int, Sink]) -> None:
        """Each rank's bytes into its sink."""
        landing = memoryview(bytearray(_CHUNK))
        for line in self._by_rank.values():
            if sinks[line.rank].missing:
                line.patience.moved()
                self._selector.register(line.socket, selectors.EVENT_READ, line)
            else:
                _close(line.socket)
        while self._selector.get_map():
            for line in self._ready([]):
                sink = sinks[line.rank]
                try:
                    count = line.socket.recv_into(landing)
                except BlockingIOError:
                    continue
                except OSError:
                    count = 0
                if not count:
                    raise DumpError(f"rank {line.rank} ended with {sink.missing} bytes to come: {self._why_early()}")
                line.patience.moved()
                sink.feed(landing[:count])
                if not sink.missing:
                    self._selector.unregister(line.socket)
                    _close(line.socket)

    def keep_alive(self) -> None:
        """Now and then a sign of life to everybody, so that nobody takes another's turn for a standstill."""
        now = time.monotonic()
        if now - self._signed < min(1.0, self._timeout_s / 8):
            return
        self._signed = now
        for line in self._by_rank.values():
            with contextlib.suppress(OSError):  # full, which is as good, or closed, which shows when it is read
                line.socket.send(_ALIVE)

    def _ready(self, waits: list[Patience]) -> list[_Line]:
        """Connections with something to read, after a wait. Raises :class:`DumpError` when one stood still."""
        began, step = time.monotonic(), min(0.05, self._timeout_s / 8)
        events = self._selector.select(step)
        lines = [key.data for key, _ in events if key.data is not None]
        if any(key.data is None for key, _ in events) and not self._accept() and not lines:
            time.sleep(step)  # it waits to be taken, and cannot be
        passed = time.monotonic() - began
        if lines:
            self.keep_alive()
        waiting = [key.data for key in self._selector.get_map().values() if key.data is not None]
        still = [line for line in waiting if line not in lines]
        for line in still:
            if not line.patience.waited(passed, step):
                if line.rank < 0:
                    self._drop(line)  # never said who it is
                    continue
                raise DumpError(f"rank {line.rank} stood still: no byte for {self._timeout_s:g} s")
        for patience in waits:
            if not patience.waited(passed, step):
                raise DumpError(f"rank(s) {self._not_here()} did not connect within {self._timeout_s:g} s")
        if still or waits:
            self._stop_if_given_up()
        return lines

    def _stop_if_given_up(self) -> None:
        """Look, once a second, whether a rank that is waited for has given up."""
        if time.monotonic() - self._asked > 1.0:
            self._asked = time.monotonic()
            failure = self._agreement.failure()
            if failure is not None:
                raise DumpError(failure)

    def _why_early(self) -> str:
        return self._agreement.failure(within_s=0.5) or "its connection was closed"

    def _not_here(self) -> list[int]:
        return sorted(self._others - set(self._by_rank))

    def _accept(self) -> bool:
        try:
            accepted, _ = self._listener.socket.accept()
        except OSError:  # such as no file descriptor left
            return False
        accepted.setblocking(False)
        line = _Line(accepted, Patience(self._timeout_s, lambda: f"bytes of rank {line.rank}", self._say))
        self._selector.register(accepted, selectors.EVENT_READ, line)
        return True

    def _drop(self, line: _Line) -> None:
        self._selector.unregister(line.socket)
        _close(line.socket)

    def _take_head(self, line: _Line) -> Description | None:
        """Read on in the greeting, then in the description; returns it once it is whole."""
        try:
            data = line.socket.recv(min(_CHUNK, line.expected - len(line.head)))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data and line.rank < 0:
            self._drop(line)
            return None
        if not data:
            raise DumpError(f"rank {line.rank} ended before it had described its part: {self._why_early()}")
        line.patience.moved()
        line.head += data
        if len(line.head) < line.expected:
            return None
        if line.rank < 0:
            token, rank, length = _HELLO.unpack(line.head)
            if token != self._listener.token or rank not in self._not_here():
                self._drop(line)  # somebody who has lost the way
                return None
            line.rank, line.head, line.expected = rank, bytearray(), length
            self._by_rank[rank] = line
            self._arrivals.moved()
            line.socket.send(self._listener.answer)
            return None
        description: Description = pickle.loads(bytes(line.head))
        line.head = bytearray()
        self._selector.unregister(line.socket)
        return description
