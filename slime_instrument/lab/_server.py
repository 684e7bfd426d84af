"""Processes for lab runs, forked from one that has imported torch and Megatron-Core already: five seconds less each.

The server never imports slime and never arms; both happen in the fork, in the order in which a fresh interpreter does
them. It serves the process that started it and ends with it. Runs that need an interpreter of another kind (another
megatron-core, other variables that Python or torch read when they start) get a fresh one instead.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

# Read once, when an interpreter starts or torch is imported: a fork cannot have others than its server.
_READ_AT_START = ("PYTHON", "TORCH", "OMP_", "MKL_", "KMP_", "CUDA_", "NVTE_", "LD_")
# What takes longest to import. The modules of the lab import the parts of Megatron-Core that training wants.
_MEGATRON = (
    *("slime_instrument.lab._ranks", "slime_instrument.lab._attention", "megatron.core.optimizer"),
    *("megatron.core.distributed", "megatron.core.pipeline_parallel"),
)
_WITH_SLIME = ("ray", "wandb", "transformers", "transformers.models.auto.modeling_auto")
_START_S = 180.0


class Process(Protocol):
    """A process for lab runs, the leader of a session of its own."""

    def end(self) -> None:
        """Kill the process and every rank that it forked; return when the process is gone."""


def needs_its_own(environment: Mapping[str, str]) -> bool:
    """Whether a run with these variables beside this process's wants an interpreter that started with them."""
    return bool(_read_at_start(environment))


def start(document: Mapping[str, Any], channel: int, log: int, *, forked: bool, real: bool) -> Process:
    """Start a process that does what ``document`` says (see ``_worker.main``).

    Args:
        channel: descriptor that the process answers on; the caller closes its own copy.
        log: descriptor of the file that takes its output.
        forked: whether a fork of the server will do.
        real: whether real slime is trained, which imports more.
    """
    environment: Mapping[str, str] = document["environment"]
    server = _server(environment, "slime" if real else "miniature") if forked else None
    reader, writer = os.pipe()
    try:
        given = reader, channel, log
        process: Process = server.fork(*given) if server is not None else _Fresh(*given, environment)
    finally:
        os.close(reader)
        with contextlib.suppress(BrokenPipeError), open(writer, "wb") as pipe:
            pipe.write(json.dumps(document).encode())
    return process


class _Fresh:
    """A new interpreter."""

    def __init__(self, reader: int, channel: int, log: int, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slime_instrument.lab._worker", str(reader), str(channel)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(environment),
            pass_fds=(reader, channel),
            start_new_session=True,
        )

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@dataclass(frozen=True)
class _Forked:
    server: _Server
    pid: int

    def end(self) -> None:
        try:
            self.server.ask(f"end {self.pid}")
        except OSError:
            # Somebody killed the server. What it forked leads a session of its own and lives on.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


class _Server:
    """The other side's view of :func:`serve`. One request at a time."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(_START_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "slime_instrument.lab._server", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environment, "SLIME_INSTRUMENT": "0"},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )

    def fork(self, *descriptors: int) -> _Forked:
        return _Forked(self, int(self.ask("fork", descriptors)))

    def ask(self, request: str, descriptors: tuple[int, ...] = ()) -> str:
        """Raises OSError if the server is gone."""
        with self._lock:
            socket.send_fds(self._connection, [request.encode()], descriptors)
            answer = self._connection.recv(64).decode()
        if not answer:
            raise ConnectionError("the lab's server has ended")
        return answer

    @property
    def serves_this_process(self) -> bool:
        return self.owner == os.getpid() and self._connection.fileno() >= 0 and self._process.poll() is None

    def close(self) -> None:
        self._connection.close()
        if self.owner == os.getpid():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)


_started: dict[tuple[tuple[str, str], ...], _Server] = {}
"""By the variables that they started with: imports of libraries set some, and a run may be going on in each."""


def _server(environment: Mapping[str, str], target: str) -> _Server | None:
    """The server of this process, started if need be; None where it cannot import what it should."""
    variables = tuple(sorted(_read_at_start(environment).items()))
    server = _started.get(variables)
    if server is None or not server.serves_this_process:
        server = _started[variables] = _Server(environment)
        atexit.register(server.close)
    try:
        server.ask(f"prepare {target}")
    except OSError:
        # What keeps it from importing torch or Megatron is told better by a process of its own, with a log.
        server.close()
        return None
    return server


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_READ_AT_START)}


def serve(connection: socket.socket) -> None:
    """Answer requests until the other side closes: ``prepare TARGET``, ``fork`` with three descriptors, ``end PID``."""
    running: set[int] = set()
    while True:
        request, descriptors, _flags, _address = socket.recv_fds(connection, 64, 3)
        word, _, subject = request.decode().partition(" ")
        if word == "fork":
            pid = os.fork()
            if not pid:
                connection.close()
                _run_worker(*descriptors)
            running.add(pid)
            for descriptor in descriptors:
                os.close(descriptor)
            answer = str(pid)
        elif word == "end":
            answer = "ended"
            _end(int(subject))
            running.discard(int(subject))
        elif word == "prepare":
            answer = "ready"
            _import_what_is_slow(subject)
        else:
            break
        connection.send(answer.encode())
    for pid in running:
        _end(pid)


@functools.cache
def _import_what_is_slow(target: str) -> None:
    """What ``target`` will import, except slime itself and what must be imported after arming."""
    from slime_instrument.lab import _cpu

    _cpu.install()  # before Megatron is imported, as in every worker
    for name in _MEGATRON:
        importlib.import_module(name)
    for name in _WITH_SLIME if target == "slime" else ():
        with contextlib.suppress(ImportError):  # slime will say it
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no fork copies these pages by counting references in them


def _run_worker(reader: int, channel: int, log: int) -> None:
    """In the fork: runs the worker and ends."""
    status = 1
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        from slime_instrument.lab import _worker

        status = _worker.main(reader, channel, forked=True)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _end(pid: int) -> None:
    # Not waited for before it is asked for: until then its number is not given to another process.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)  # it may not have become the leader of its session yet
    os.waitpid(pid, 0)


if __name__ == "__main__":
    # A fork has the working directory that its document names, not this one's.
    del sys.path[0]
    with socket.socket(fileno=int(sys.argv[1])) as connection_:
        serve(connection_)
