"""The process of lab runs: imports slime once, forks each run's ranks, reports on the given descriptor."""

from __future__ import annotations

import importlib
import json
import multiprocessing as mp
import os
import shutil
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from slime_instrument.lab._options import LabOptions

# A rank that fails takes its peers' connections down; they get this long to say so before they are killed.
_AFTERMATH_S = 3.0


def main(reader: int, channel: int, *, forked: bool = False) -> int:
    """Do the runs described by the JSON document read from ``reader``, and answer with JSON lines on ``channel``.

    The document has ``runs`` (LabOptions as JSON texts), ``environment`` and ``directory``, the working directory.
    ``forked``: this process did not start with that environment, but was forked from one that imported beforehand.
    """
    with open(reader, "rb") as pipe:
        document = json.load(pipe)
    os.environ.clear()
    os.environ.update(document["environment"])
    os.chdir(document["directory"])
    if forked:
        _start_file()
    runs = [LabOptions.from_json(text) for text in document["runs"]]
    answers = os.fdopen(channel, "w", buffering=1)

    def say(event: str, **values: Any) -> None:
        answers.write(json.dumps({"event": event, **values}, default=str) + "\n")
        answers.flush()

    began = time.monotonic()
    try:
        from slime_instrument.lab import _target

        say("progress", text=f"importing {_target.describe(runs[0])}")
        actor_module = _target.prepare(runs[0])
    except BaseException:
        for _ in runs:
            say("failed", text="slime could not be imported", tracebacks={-1: traceback.format_exc()})
        return 1
    imported = time.monotonic() - began
    for number, options in enumerate(runs):
        if number:
            _log_into(options)
            began, imported = time.monotonic(), 0.0
        _run(options, actor_module, say, began, imported)
    return 0


def _start_file() -> None:
    """What the start file of the installed package does in a new interpreter; where there is none, nothing."""
    try:
        start: Any = importlib.import_module("_slime_instrument_start").start
    except ImportError:
        return
    start(".pth")


def _log_into(options: LabOptions) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    with open(options.out / "lab.log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


def _run(options: LabOptions, actor_module: Any, say: Any, began: float, imported: float) -> None:
    from slime_instrument.lab import _target

    outcome = _run_ranks(options, actor_module, say)
    if outcome["tracebacks"]:
        say("failed", **outcome)
        return
    results: dict[int, dict[str, Any]] = outcome["results"]
    calls: Counter[str] = Counter()
    for result in results.values():
        calls.update(result["custom_calls"])
    unused = sorted(name for name in calls if not calls[name])
    if unused:
        named = ", ".join(f"{name}={options.custom_functions[name]}" for name in unused)
        text = f"{named}: never called on any rank. What was trained does not depend on it; nothing is tested so."
        say("failed", text=text, tracebacks={})
        return
    last_stage = next(result for result in results.values() if result["reports"])
    say(
        "done",
        target="slime" if options.slime else "miniature",
        slime_version=_target.version(options),
        patches=last_stage["patches"],
        logged_metrics=last_stage["logged_metrics"],
        custom_calls=dict(calls),
        seconds={
            "import": round(imported, 2),
            "init": round(max(result["init_s"] for result in results.values()), 2),
            "train": round(max(result["train_s"] for result in results.values()), 2),
            "total": round(time.monotonic() - began, 2),
        },
    )


def _run_ranks(options: LabOptions, actor_module: Any, say: Any) -> dict[str, Any]:
    from slime_instrument.lab._ranks import checkpoint_of, rank_main

    try:
        return _answers_of_ranks(options, actor_module, rank_main, say)
    finally:
        shutil.rmtree(checkpoint_of(options), ignore_errors=True)


def _answers_of_ranks(
    options: LabOptions, actor_module: Any, rank_main: Callable[..., None], say: Any
) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    say("progress", text=f"training on {options.world} process(es)")
    context = mp.get_context("fork")
    processes: dict[int, BaseProcess] = {}
    readers: dict[Connection, int] = {}
    for rank in range(options.world):
        reader, writer = context.Pipe(duplex=False)
        process: BaseProcess = context.Process(
            target=rank_main, args=(options, actor_module, rank, port, writer), daemon=True
        )
        process.start()
        # Closed before the next fork: only the rank itself holds its end, so its death reads as end of file here.
        writer.close()
        processes[rank], readers[reader] = process, rank
    results: dict[int, dict[str, Any]] = {}
    tracebacks: dict[int, str] = {}
    deadline = time.monotonic() + options.timeout
    while readers:
        ready: list[Any] = wait(list(readers), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for reader in ready:
            rank = readers[reader]
            try:
                kind, value = reader.recv()
            except EOFError:
                del readers[reader]
                if rank not in results and rank not in tracebacks:
                    tracebacks[rank] = _last_words(options, processes[rank], rank)
                    deadline = min(deadline, time.monotonic() + _AFTERMATH_S)
                continue
            if kind == "progress":
                say("progress", text=value)
            elif kind == "result":
                results[rank] = value
            else:
                tracebacks[rank] = value
                deadline = min(deadline, time.monotonic() + _AFTERMATH_S)
    for process in processes.values():
        # A rank that is done may still be writing a dump in the background, as it would in a real job.
        _end(process, 0 if tracebacks else max(_AFTERMATH_S, deadline - time.monotonic()))
    missing = sorted(set(processes) - set(results) - set(tracebacks))
    if missing and not tracebacks:
        tracebacks = dict.fromkeys(missing, "no answer and no traceback")
    failed = ", ".join(map(str, tracebacks))
    return {"results": results, "tracebacks": tracebacks, "text": f"failed on rank(s) {failed}"}


def _end(process: BaseProcess, patience_s: float) -> None:
    process.join(patience_s)
    if process.is_alive():
        process.kill()
        process.join()


def _last_words(options: LabOptions, process: BaseProcess, rank: int) -> str:
    """What a rank that ended without a word left: where it hung, or how it died."""
    process.join(_AFTERMATH_S)
    stack = options.out / f"hung_{rank}.txt"
    if stack.is_file() and stack.stat().st_size:
        return f"no answer in {options.timeout:g} s; it was here:\n{stack.read_text(errors='replace')}"
    return f"ended with exit code {process.exitcode} and without a traceback; see lab.log"


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
