"""Runs trainings in processes of their own, relays their progress, and leaves none of them running."""

from __future__ import annotations

import json
import os
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slime_instrument.lab import _server
from slime_instrument.lab._options import LabError, LabOptions, LabResult
from slime_instrument.lab._preconditions import check, needs_old_core

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
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])


def train(options: LabOptions, *, progress: Callable[[str], None] | None = None) -> LabResult:
    """Train as ``options`` say and return what was written; raise :class:`LabError` if any rank failed."""
    outcome = next(train_all([options], progress=progress))
    if isinstance(outcome, LabError):
        raise outcome
    return outcome


def train_all(
    runs: Sequence[LabOptions], *, progress: Callable[[str], None] | None = None
) -> Iterator[LabResult | LabError]:
    """Train several runs one after another in one interpreter, which imports slime once: half of a run's time.

    The runs must want the same interpreter: slime, core, plugin, environment, armed or not; LabError is raised if they
    do not. Yields each run's result, or the error that it ended with, or was refused with before anything was started;
    the runs behind it go on.
    """
    runs = [_with_old_core(options) for options in runs]
    for options in runs:
        if _interpreter(options) != _interpreter(runs[0]):
            raise LabError(f"slime_instrument: lab run in {options.out}: wants another interpreter than the one before")
    refusals = [_refusal(options) for options in runs]
    accepted = [options for options, refusal in zip(runs, refusals, strict=True) if refusal is None]
    outcomes = _train_accepted(accepted, progress or (lambda _text: None))
    for refusal in refusals:
        yield next(outcomes) if refusal is None else refusal


def _train_accepted(runs: list[LabOptions], progress: Callable[[str], None]) -> Iterator[LabResult | LabError]:
    for options in runs:
        options.out.mkdir(parents=True, exist_ok=True)
    remaining = list(runs)
    while remaining:
        # A worker that died took the runs behind the current one with it; they get another.
        with _Worker(remaining, progress) as worker:
            for options in list(remaining):
                remaining.pop(0)
                yield _one_run(worker, options)
                if worker.gone:
                    break


def _refusal(options: LabOptions) -> LabError | None:
    try:
        check(options)
    except LabError as error:
        return error
    return None


def _with_old_core(options: LabOptions) -> LabOptions:
    folder = os.environ.get("SLIME_OLD_CORE")
    if folder and options.core is None and options.slime is not None and needs_old_core(options.slime):
        return replace(options, core=Path(folder))
    return options


def _interpreter(options: LabOptions) -> tuple[Any, ...]:
    environment = tuple(sorted(options.environment.items()))
    return options.slime, options.core, options.plugin, options.instrumented, environment


def _one_run(worker: _Worker, options: LabOptions) -> LabResult | LabError:
    folders = ("train_data", "rollout_data", "weights")
    before = {folder: _fingerprints(options.out / folder) for folder in folders}
    try:
        answer = worker.answer(options)
    except LabError as error:
        return error

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
        custom_calls=answer["custom_calls"],
    )


class _Worker:
    """The process of some runs, and the pipe that it answers through."""

    def __init__(self, runs: Sequence[LabOptions], progress: Callable[[str], None]) -> None:
        self._progress = progress
        self.gone = False
        first = runs[0]
        environment = {**os.environ, **_QUIET, **first.environment}
        environment["SLIME_INSTRUMENT"] = "1" if first.instrumented else "0"
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [_PACKAGE_ROOT, environment.get("PYTHONPATH")]))
        document = {
            "environment": environment,
            "directory": os.getcwd(),
            "runs": [options.to_json() for options in runs],
        }
        reader, writer = os.pipe()
        self._answers = os.fdopen(reader, "rb", buffering=0)
        self._pending: list[dict[str, Any]] = []
        self._tail_of_line = b""
        try:
            with open(first.out / "lab.log", "wb") as log:
                # A session of its own: one signal then ends it and every rank, whatever state they are in.
                forked = first.core is None and not _server.needs_its_own(first.environment)
                self._process = _server.start(
                    document, writer, log.fileno(), forked=forked, real=first.slime is not None
                )
        finally:
            os.close(writer)

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.end()
        self._answers.close()

    def answer(self, options: LabOptions) -> dict[str, Any]:
        """What the worker says at the end of the run ``options``; LabError where it failed."""
        subject = f"slime_instrument: lab run in {options.out}"
        deadline = time.monotonic() + options.timeout + _GRACE_S
        try:
            while True:
                message = self._next_message(deadline)
                if message is None:
                    self.gone = True
                    raise LabError(f"{subject}: the worker ended early\n{_tail(options.out / 'lab.log')}")
                if message["event"] == "progress":
                    self._progress(message["text"])
                elif message["event"] == "failed":
                    tracebacks = {int(rank): text for rank, text in message["tracebacks"].items()}
                    raise LabError(f"{subject}: {message['text']}", tracebacks)
                else:
                    return message
        except TimeoutError:
            self.gone = True
            tail = _tail(options.out / "lab.log")
            raise LabError(f"{subject}: no answer in {options.timeout:g} s\n{tail}") from None

    def _next_message(self, deadline: float) -> dict[str, Any] | None:
        """A JSON line; None at the end of what the worker has to say, TimeoutError after the deadline."""
        while not self._pending:
            with selectors.DefaultSelector() as selector:
                selector.register(self._answers, selectors.EVENT_READ)
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
            chunk = self._answers.read(1 << 16)
            if not chunk:
                return None
            *lines, self._tail_of_line = (self._tail_of_line + chunk).split(b"\n")
            self._pending += [json.loads(line) for line in lines]
        return self._pending.pop(0)


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
    return path.read_text(errors="replace")[-4000:] if path.is_file() else "it left no log"
