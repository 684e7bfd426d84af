"""Bring every rank's bytes to the writer, over sockets of our own. Nothing here touches training's groups.

A collective that times out would leave its process group broken for training, and messages on a group of training's
could meet the user's own. Here whatever goes wrong ends with a closed socket, which the other end sees at once.
Only the time in which no byte moves is limited, not the size of a dump or the time that it takes in all.

A connection carries, from the sender: token, rank, length of the description, the description, the payload; from the
writer: an answer that proves who it is, then single bytes that show it is alive, until it closes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import pickle
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime_instrument._dump.agree import Agreement, Patience, Topology, innermost
from slime_instrument._dump.contribute import Contribution, bytes_of
from slime_instrument._errors import DumpError, describe

_HELLO = struct.Struct("!16sIQ")
_CHUNK = 1 << 20
_ALIVE = b"."


def send(contribution: Contribution, address: Mapping[str, Any], agreement: Agreement, bucket_bytes: int) -> int:
    """A rank that does not write: send its own part. Returns the number of bytes. Raises :class:`DumpError`."""
    description, writer = contribution.description.encode(), agreement.topology.writer
    patience = agreement.patience(lambda: f"rank {writer} to take bytes")
    total = left = len(description) + contribution.nbytes
    with _connect(address, agreement.topology, len(description), agreement.timeout_s) as line:
        try:
            for piece in itertools.chain([memoryview(description)], map(bytes_of, contribution.pieces(bucket_bytes))):
                _send_piece(line, piece, patience)
                left -= len(piece)
            line.shutdown(socket.SHUT_WR)
            # Closing with signs of life unread would reset the connection, and bytes under way would be lost.
            while _receive_some(line, patience):
                pass
        except OSError as error:
            if left:
                why = agreement.failure(within_s=0.5) or describe(error)
                raise DumpError(f"rank {writer} took no more bytes: {why}") from None
        except _StoodStill:
            if left:  # with everything sent, it is the writer's to say whether there is a dump
                raise DumpError(f"rank {writer} took no byte for {agreement.timeout_s:g} s") from None
    return total


class _StoodStill(Exception):
    """No byte moved for as long as is allowed."""


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


def _hosts(store: Any) -> list[str]:
    """Addresses of this machine, the likeliest first: of the interface that the user named for gloo or NCCL, the one
    that leads to the job's store, and what the machine's name resolves to, as gloo itself does."""
    hosts = [_of_interface(name) for name in _named_interfaces()]
    for host in (getattr(innermost(store), "host", None), os.environ.get("MASTER_ADDR")):
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
    part: Contribution | None = None
    room: list[memoryview] = field(default_factory=list)
    """Memory of ``part`` that is still to be filled, the next first."""


class Receiver:
    """The writer's side; ``senders`` are to connect to :attr:`address`. Close it whatever happens.

    All descriptions come first: they say how much memory each part takes. Bytes are then taken from whichever rank has
    some, straight into that memory, so that a slow one holds up nobody.
    """

    def __init__(self, agreement: Agreement, senders: Iterable[int]) -> None:
        self._agreement, self._senders = agreement, frozenset(senders)
        self._by_rank: dict[int, _Line] = {}
        self._signed = time.monotonic()
        self._asked = 0.0
        # First: where no descriptor is left, nothing may be open that only a garbage collection closes.
        self._listener = _listening()
        self._selector = selectors.DefaultSelector()
        self._arrivals = agreement.patience(lambda: f"rank(s) {self._not_here()} to connect")
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._token, self._answer = secrets.token_bytes(16), secrets.token_bytes(16)
        self.address = {
            "hosts": _hosts(agreement.store),
            "port": self._listener.getsockname()[1],
            "machine": _machine(),
            "token": self._token.hex(),
            "answer": self._answer.hex(),
        }

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        connected = [key.data for key in self._selector.get_map().values() if key.data is not None]
        for line in (*connected, *self._by_rank.values()):
            _close(line.socket)
            line.part, line.room = None, []  # break the cycle line, patience, lambda, line
        self._selector.close()
        self._listener.close()

    def receive(self, own: Contribution) -> list[Contribution]:
        """Everybody's part, ``own`` among them; the others' are in memory of their own.

        Raises :class:`DumpError` naming the ranks that stood still or ended early.
        """
        self._take_descriptions()
        self._take_parts()
        others = [self._by_rank[rank].part for rank in sorted(self._by_rank)]
        return [own, *(part for part in others if part is not None)]

    def _take_descriptions(self) -> None:
        """Of all senders."""
        while any(line.part is None for line in self._by_rank.values()) or self._not_here():
            for line in self._ready([self._arrivals] if self._not_here() else []):
                self._take_head(line)
        for key in list(self._selector.get_map().values()):  # who has connected and said nothing
            if key.data is not None:
                self._drop(key.data)
        self._selector.unregister(self._listener)

    def _take_parts(self) -> None:
        """Each rank's bytes."""
        for line in self._by_rank.values():
            if line.room:
                line.patience.moved()
                self._selector.register(line.socket, selectors.EVENT_READ, line)
            else:
                _close(line.socket)
        while self._selector.get_map():
            for line in self._ready([]):
                self._take_some(line)

    def _take_some(self, line: _Line) -> None:
        try:
            count = line.socket.recv_into(line.room[0][:_CHUNK])
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            missing = sum(map(len, line.room))
            raise DumpError(f"rank {line.rank} ended with {missing} bytes to come: {self._why_early()}")
        line.patience.moved()
        line.room[0] = line.room[0][count:]
        if not line.room[0]:
            line.room.pop(0)
        if not line.room:
            self._drop(line)

    def _keep_alive(self) -> None:
        """Send every rank a byte now and then, so that one that waits for its turn does not time out."""
        now = time.monotonic()
        if now - self._signed < min(1.0, self._agreement.timeout_s / 8):
            return
        self._signed = now
        for line in self._by_rank.values():
            with contextlib.suppress(OSError):  # full, which is as good, or closed, which shows when it is read
                line.socket.send(_ALIVE)

    def _ready(self, waits: list[Patience]) -> list[_Line]:
        """Connections with something to read, after a wait. Raises :class:`DumpError` when one stood still."""
        timeout_s = self._agreement.timeout_s
        began, step = time.monotonic(), min(0.05, timeout_s / 8)
        events = self._selector.select(step)
        lines = [key.data for key, _ in events if key.data is not None]
        if any(key.data is None for key, _ in events) and not self._accept() and not lines:
            time.sleep(step)  # it waits to be taken, and cannot be
        passed = time.monotonic() - began
        if lines:
            self._keep_alive()
        waiting = [key.data for key in self._selector.get_map().values() if key.data is not None]
        still = [line for line in waiting if line not in lines]
        for line in still:
            if not line.patience.waited(passed, step):
                if line.rank < 0:
                    self._drop(line)  # never said who it is
                    continue
                raise DumpError(f"rank {line.rank} stood still: no byte for {timeout_s:g} s")
        for patience in waits:
            if not patience.waited(passed, step):
                raise DumpError(f"rank(s) {self._not_here()} did not connect within {timeout_s:g} s")
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
        return sorted(self._senders - set(self._by_rank))

    def _accept(self) -> bool:
        try:
            accepted, _ = self._listener.accept()
        except OSError:  # such as no file descriptor left
            return False
        accepted.setblocking(False)
        line = _Line(accepted, self._agreement.patience(lambda: f"bytes of rank {line.rank}"))
        self._selector.register(accepted, selectors.EVENT_READ, line)
        return True

    def _drop(self, line: _Line) -> None:
        self._selector.unregister(line.socket)
        _close(line.socket)

    def _take_head(self, line: _Line) -> None:
        """Read on in the greeting, then in the description."""
        try:
            data = line.socket.recv(min(_CHUNK, line.expected - len(line.head)))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data and line.rank < 0:
            self._drop(line)
            return
        if not data:
            raise DumpError(f"rank {line.rank} ended before it had described its part: {self._why_early()}")
        line.patience.moved()
        line.head += data
        if len(line.head) < line.expected:
            return
        if line.rank < 0:
            token, rank, length = _HELLO.unpack(line.head)
            if token != self._token or rank not in self._not_here():
                self._drop(line)  # not one of the expected senders
                return
            line.rank, line.head, line.expected = rank, bytearray(), length
            self._by_rank[rank] = line
            self._arrivals.moved()
            line.socket.send(self._answer)
        else:
            line.part = Contribution.empty(pickle.loads(bytes(line.head)))
            line.room = line.part.memory()
            line.head = bytearray()
            self._selector.unregister(line.socket)


def _listening() -> socket.socket:
    """A socket that takes connections, on IPv6 too where this machine has it."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    try:
        listener = socket.create_server(("", 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
    except OSError:
        try:
            listener = socket.create_server(("", 0))
        except OSError as error:
            raise DumpError(f"no socket can be had: {describe(error)}") from error
    listener.setblocking(False)
    return listener
