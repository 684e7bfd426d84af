"""``python -m tests.faults.soak --slime DIR --rollouts 500 --seed 1``: a long training with faults at random moments.

Two trainings of the same data: one without the package, one armed, in which about every third rollout has a fault of a
random kind on a random rank. Afterwards

- the weights are equal, bit for bit;
- each rollout without a fault has its whole, valid dump, and each other one a whole dump or none;
- the journal says of each rollout what the folder shows;
- no rank's memory has grown by more than that of the run without the package, but for a margin.

The seed decides every fault, so that a run can be made again.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TIMEOUT_S = 1.0
"""What ranks wait for each other at most; faults that make them wait take longer."""
MARGIN_MB = 40.0

KINDS = ("raise", "disk", "stop", "late", "closed", "value", "twice", "capture")


def fault_of(seed: int, rollout_id: int, world: int) -> tuple[str, int, random.Random] | None:
    """Kind, rank, and a source of further randomness; None for a rollout without a fault. The same on every rank."""
    source = random.Random(f"{seed}/{rollout_id}")
    if source.random() > 0.35:
        return None
    return source.choice(KINDS), source.randrange(world), source


def install(rank: int, actor_module: Any, args: Any) -> None:
    """The lab's rank hook: plant the faults of this rank, and note its memory."""
    seed, out = int(os.environ["SOAK_SEED"]), Path(os.environ["SOAK_OUT"])
    world = int(os.environ["SOAK_WORLD"])
    real = actor_module.MegatronTrainRayActor.train

    def train(actor: Any, rollout_id: int, boxes: Any, *more: Any, **named: Any) -> Any:
        fault = fault_of(seed, rollout_id, world)
        planted = contextlib.nullcontext()
        if fault is not None and os.environ["SLIME_INSTRUMENT"] == "1":
            planted = _planted(fault, rank, actor_module, rollout_id)  # type: ignore[assignment]
        with planted:
            result = real(actor, rollout_id, boxes, *more, **named)
        if rollout_id % 50 == 49:
            with open(out / f"memory_{rank}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps([rollout_id, _resident_mb()]) + "\n")
        return result

    actor_module.MegatronTrainRayActor.train = train


@contextlib.contextmanager
def _planted(fault: tuple[str, int, random.Random], rank: int, actor_module: Any, rollout_id: int) -> Iterator[None]:
    from slime_instrument._dump import agree, dumper, exchange
    from slime_instrument._hooks.capture import CaptureSession

    kind, where, source = fault
    with contextlib.ExitStack() as undo:
        if kind == "value":  # on every rank, as a hook of the user's would
            undo.enter_context(_replaced(actor_module, "log_rollout_data", lambda real: _with_odd_values(real)))
        elif kind == "twice":
            undo.enter_context(_replaced(_dump_module(actor_module), "save_debug_train_data", _called_twice))
        elif rank != where:
            pass
        elif kind == "raise":
            place, name = source.choice(
                [
                    *((dumper, name) for name in ("contribute", "provenance", "build_payload", "write_dump")),
                    *((exchange, "send"), (agree.Agreement, "arrive"), (exchange.Receiver, "_take_some")),
                ]
            )
            undo.enter_context(_replaced(place, name, lambda real: _raising(RuntimeError("planted"))))
        elif kind == "disk":
            code = source.choice([errno.ENOSPC, errno.EIO, errno.EDQUOT])
            name = source.choice(["fsync", "replace"])
            undo.enter_context(_replaced(os, name, lambda real: _raising(OSError(code, os.strerror(code)))))
        elif kind == "stop":
            _stop_for_a_while(source.uniform(0.0, 0.4), source.uniform(0.2, 2.5))
        elif kind == "late":
            seconds = source.uniform(0.2, 2.0)
            undo.enter_context(_replaced(dumper, "contribute", lambda real: _late(real, seconds)))
        elif kind == "closed":
            undo.enter_context(_replaced(exchange, "_send_piece", lambda real: _raising(OSError(errno.EPIPE, "gone"))))
        elif kind == "capture":
            undo.enter_context(_replaced(CaptureSession, "capture", lambda real: _raising(ValueError("planted"))))
        yield


def _dump_module(actor_module: Any) -> Any:
    return actor_module.train_dump_utils


@contextlib.contextmanager
def _replaced(place: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    real = getattr(place, name)
    setattr(place, name, make(real))
    try:
        yield
    finally:
        setattr(place, name, real)


def _raising(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error.with_traceback(None)

    return fail


def _late(real: Any, seconds: float) -> Callable[..., Any]:
    def late(*given: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return real(*given, **named)

    return late


def _called_twice(real: Any) -> Callable[..., Any]:
    def twice(*given: Any, **named: Any) -> Any:
        real(*given, **named)
        return real(*given, **named)

    return twice


def _with_odd_values(real: Any) -> Callable[..., Any]:
    import torch

    def log(rollout_id: int, args: Any, rollout_data: dict[str, Any]) -> Any:
        result = real(rollout_id, args, rollout_data)
        rollout_data["odd"] = [torch.eye(3).to_sparse(), {1: (value for value in ())}, threading.Lock()]
        rollout_data["unsigned"] = torch.ones(3).to(torch.uint16)
        return result

    return log


def _stop_for_a_while(after_s: float, for_s: float) -> None:
    """Stop this process at a random moment, and let a child continue it."""
    me = os.getpid()
    if os.fork() == 0:
        try:
            time.sleep(after_s)
            os.kill(me, signal.SIGSTOP)
            time.sleep(for_s)
        finally:
            os.kill(me, signal.SIGCONT)
            os._exit(0)


def _resident_mb() -> float:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


def soak(slime: Path | None, rollouts: int, seed: int, layout: tuple[int, int, int, int], out: Path) -> list[str]:
    """Train both; returns what is wrong."""
    from slime_instrument.lab import LabOptions, train

    tp, pp, cp, dp = layout
    runs = {}
    for armed in (False, True):
        folder = out / ("armed" if armed else "alone")
        folder.mkdir(parents=True, exist_ok=True)
        options = LabOptions(
            out=folder,
            slime=slime,
            tp=tp,
            pp=pp,
            cp=cp,
            dp=dp,
            rollouts=rollouts,
            instrumented=armed,
            save_weights=True,
            rank_hook=f"{__file__}:install",
            timeout=60.0 + 8.0 * rollouts,
            environment={
                "SOAK_SEED": str(seed),
                "SOAK_OUT": str(folder),
                "SOAK_WORLD": str(tp * pp * cp * dp),
                "SLIME_INSTRUMENT_TIMEOUT_S": str(TIMEOUT_S),
            },
        )
        began = time.monotonic()
        runs[armed] = train(options)
        print(f"{'armed' if armed else 'alone'}: {rollouts} rollouts in {time.monotonic() - began:.0f} s", flush=True)
    return [
        *_compare_weights(runs[False].weights, runs[True].weights),
        *_compare_dumps(out / "armed", rollouts, seed, tp * pp * cp * dp),
        *_compare_memory(out, tp * pp * cp * dp),
    ]


def _compare_weights(alone: list[Path], armed: list[Path]) -> Iterator[str]:
    import torch

    def tensors(value: Any, at: str = "") -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield at, value
        for key, item in value.items() if isinstance(value, dict) else ():
            yield from tensors(item, f"{at}/{key}")

    if not alone or len(alone) != len(armed):
        yield f"weights: {len(alone)} files without the package, {len(armed)} with it"
    for one, other in zip(alone, armed, strict=False):
        pairs = zip(tensors(torch.load(one)), tensors(torch.load(other)), strict=True)
        different = [name for (name, a), (_, b) in pairs if not torch.equal(a, b)]
        if different:
            yield f"weights: {one.name} differs in {different[:3]}"


def _compare_dumps(folder: Path, rollouts: int, seed: int, world: int) -> Iterator[str]:
    from slime_instrument._format.journal import read_journal
    from slime_instrument._validate import validate_files

    journal = read_journal(folder / "train_data")
    last = {entry.rollout_id: entry.state for entry in journal.rollouts}
    kept = {"dumps": 0, "faults": 0, "lost": 0}
    for rollout_id in range(rollouts):
        path, fault = folder / "train_data" / f"{rollout_id}.pt", fault_of(seed, rollout_id, world)
        kept["faults"] += fault is not None
        kept["dumps"] += path.is_file()
        kept["lost"] += not path.is_file()
        if path.is_file():
            found = validate_files([path]).errors
            if found:
                yield f"rollout {rollout_id} ({fault}): {found[0]}"
        elif fault is None:
            yield f"rollout {rollout_id} has no fault and no dump"
        states = {entry.state for entry in journal.rollouts if entry.rollout_id == rollout_id}
        if path.is_file() != ("written" in states):
            yield f"rollout {rollout_id}: the journal says {last.get(rollout_id)}, the file is there: {path.is_file()}"
    print(kept, flush=True)


def _compare_memory(out: Path, world: int) -> Iterator[str]:
    for rank in range(world):
        growth = {}
        for name in ("alone", "armed"):
            lines = (out / name / f"memory_{rank}.jsonl").read_text(encoding="utf-8").splitlines()
            readings = [json.loads(line)[1] for line in lines]
            growth[name] = readings[-1] - readings[0] if readings else 0.0
        print(f"rank {rank}: memory grew by {growth['armed']:.1f} MB, alone {growth['alone']:.1f} MB", flush=True)
        if growth["armed"] > growth["alone"] + MARGIN_MB:
            yield f"rank {rank}: memory grew by {growth['armed']:.1f} MB, alone {growth['alone']:.1f} MB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--slime", type=Path, default=None)
    parser.add_argument("--rollouts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layout", default="1,1,2,2", help="tp,pp,cp,dp")
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    tp, pp, cp, dp = map(int, given.layout.split(","))
    with tempfile.TemporaryDirectory(prefix="soak_") as folder:
        problems = soak(given.slime, given.rollouts, given.seed, (tp, pp, cp, dp), given.out or Path(folder))
    for problem in problems:
        print("PROBLEM:", problem)
    print("clean" if not problems else f"{len(problems)} problem(s)")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
