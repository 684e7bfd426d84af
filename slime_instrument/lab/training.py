"""Runs one training in a fresh interpreter, relays its progress, and leaves nothing running."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slime_instrument.lab.options import LabError, LabOptions, LabResult
from slime_instrument.lab.preconditions import check

# Real slime compiles its losses and asks NCCL, W&B and tokenizers for things that a CPU test has no use for.
_QUIET = {
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "GLOO_SOCKET_IFNAME": "lo",
}
# Above the ranks' own deadline, so that the tracebacks of ranks that hang arrive before everything is killed.
_GRACE_S = 10.0


def train(options: LabOptions, *, progress: Callable[[str], None] | None = None) -> LabResult:
    """Train as ``options`` say and return what was written; raise :class:`LabError` if any rank failed."""
    check(options)
    options.out.mkdir(parents=True, exist_ok=True)
    before = {folder: _fingerprints(options.out / folder) for folder in ("train_data", "rollout_data", "weights")}
    answer = _run_worker(options, progress or (lambda _text: None))

    def written(folder: str) -> list[Path]:
        now = _fingerprints(options.out / folder)
        return sorted((path for path in now if before[folder].get(path) != now[path]), key=_by_numbers)

    return LabResult(
        target=answer["target"],
        slime_version=answer["slime_version"],
        layout=options.layout,
        world=options.world,
        seconds=answer["seconds"],
        train_dumps=written("train_data"),
        rollout_dumps=written("rollout_data"),
        weights=written("weights"),
        patches=answer["patches"],
        logged_metrics=answer["logged_metrics"],
    )


def _run_worker(options: LabOptions, progress: Callable[[str], None]) -> dict[str, Any]:
    log_path = options.out / "lab.log"
    package_root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, **_QUIET, **options.environment}
    environment["SLIME_INSTRUMENT"] = "1" if options.instrumented else "0"
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, environment.get("PYTHONPATH")]))
    reader, writer = os.pipe()
    with open(log_path, "wb") as log, os.fdopen(reader, "rb", buffering=0) as answers:
        try:
            # A session of its own: one signal then ends the worker and every rank, whatever state they are in.
            process = subprocess.Popen(
                [sys.executable, "-m", "slime_instrument.lab.worker", str(writer)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=(writer,),
                start_new_session=True,
            )
        finally:
            os.close(writer)
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(options.to_json().encode())
            for message in _messages(answers, time.monotonic() + options.timeout + _GRACE_S):
                if message["event"] == "progress":
                    progress(message["text"])
                elif message["event"] == "failed":
                    tracebacks = {int(rank): text for rank, text in message["tracebacks"].items()}
                    raise LabError(f"slime_instrument: lab run in {options.out}: {message['text']}", tracebacks)
                else:
                    return dict(message)
            raise LabError(f"slime_instrument: lab run in {options.out}: the worker ended early\n{_tail(log_path)}")
        except TimeoutError:
            raise LabError(
                f"slime_instrument: lab run in {options.out}: no answer in {options.timeout:g} s\n{_tail(log_path)}"
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _messages(stream: Any, deadline: float) -> Iterator[dict[str, Any]]:
    """JSON lines until the other side closes; TimeoutError after the deadline."""
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(stream, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            chunk = stream.read(1 << 16)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                yield json.loads(line)


def _fingerprints(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """What is in ``folder``, so that a run reports the files it wrote and not those of an earlier one."""
    files = {}
    for path in folder.rglob("*.pt"):
        stat = path.stat()
        files[path] = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
    return files


def _by_numbers(path: Path) -> tuple[list[int], str]:
    return [int(part) for part in path.stem.split("_") if part.isdigit()], path.name


def _tail(path: Path) -> str:
    return path.read_text(errors="replace")[-4000:]
