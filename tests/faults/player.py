"""What a rank does: plays scenarios with one actor, and reports what it sees after each rollout."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import hashlib
import io
import logging
import os
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.faults.scenarios import Scenario, reference
from tests.faults.sites import ALL, Trigger, planted

__all__ = ["PEER_TIMEOUT_S", "SENTINEL", "TIMEOUT_S", "Player", "folder_of"]

SENTINEL = b"an older good dump"
TIMEOUT_S = 20.0
"""What ranks wait for each other at most; a scenario in which one waits that long has failed."""


PEER_TIMEOUT_S = 2.0
"""The same, where a peer is late or dead: this is what the others have to wait."""


def folder_of(out: Path, scenario: Scenario, number: int) -> Path:
    return out / "played" / str(number)


class Player:
    """Takes the place of ``actor.train``: the first calls only record their data, the last one plays everything."""

    def __init__(
        self, scenarios: list[tuple[int, Scenario]], out: Path, recorded: int, say: Callable[[int, int, Any], None]
    ) -> None:
        self.scenarios, self.out, self.say = scenarios, out, say
        self._to_record = recorded
        self._recorded: list[tuple[int, Any, dict[str, Any]]] = []
        self._sessions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._meetings = 0

    def install(self, rank: int, actor_module: Any, args: Any) -> None:
        """The lab's rank hook."""
        self.rank, self.args, self.actor_module = rank, args, actor_module
        stacks = open(self.out / f"stacks_{rank}.txt", "w")  # noqa: SIM115 - held for the life of the process
        faulthandler.register(signal.SIGUSR1, stacks)
        cls = actor_module.MegatronTrainRayActor
        real = cls.train

        def train(actor: Any, rollout_id: int, boxes: Any, **more: Any) -> None:
            self._recorded.append((rollout_id, boxes, more))
            if len(self._recorded) == self._to_record:
                self._play_all(actor, functools.partial(real, actor))

        cls.train = train

    def _play_all(self, actor: Any, train: Callable[..., None]) -> None:
        from torch.distributed import distributed_c10d

        from slime_instrument._dump.agree import read_topology
        from slime_instrument._hooks.capture import CaptureSession

        self._parameters = [parameter for chunk in actor.model for parameter in chunk.parameters()]
        self._initial = [tensor.detach().clone() for tensor in self._parameters]
        self._topology = read_topology()
        self._store = distributed_c10d._get_default_store()
        opened = CaptureSession.__init__

        def noticed(session: Any, *args: Any, **kwargs: Any) -> None:
            opened(session, *args, **kwargs)
            self._sessions.add(session)

        setattr(CaptureSession, "__init__", noticed)  # noqa: B010 - a method cannot be assigned to
        _look_for_aliases_in_slime_only()
        gc.collect()
        gc.freeze()
        if not self.scenarios[0][1].alone:
            # Training itself takes some memory that it keeps; what is counted later is then the same every time.
            self._play(actor, train, -1, reference())
        for number, scenario in self.scenarios:
            self.say(number, self.rank, self._play(actor, train, number, scenario))

    def _play(self, actor: Any, train: Callable[..., None], number: int, scenario: Scenario) -> dict[str, Any]:
        os.environ["SLIME_INSTRUMENT_STRICT"] = str(int(scenario.strict))
        patience = PEER_TIMEOUT_S if ALL[scenario.site].kind == "peer" else TIMEOUT_S
        os.environ["SLIME_INSTRUMENT_TIMEOUT_S"] = str(patience)
        os.environ["SLIME_INSTRUMENT_BUCKET_MB"] = "0.00005"  # several messages per rank, so that one can be the last
        folder = folder_of(self.out, scenario, number)
        self.args.save_debug_train_data = str(folder / "{rollout_id}.pt")
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for rollout_id in range(scenario.rollouts):
                (folder / f"{rollout_id}.pt").write_bytes(SENTINEL)
        trigger = Trigger(ALL[scenario.site], scenario.nth)
        here = scenario.rank in (-1, self.rank)
        seen = []
        with planted(trigger):
            self._meet()
            for rollout_id, boxes, more in self._recorded[: scenario.rollouts]:
                trigger.begin(here and rollout_id in scenario.faulty)
                last = scenario.alone and rollout_id + 1 == scenario.rollouts
                seen.append(self._one(actor, train, rollout_id, boxes, more, trigger, last))
                if scenario.alone and (seen[-1]["error"] is not None or rollout_id + 1 == scenario.rollouts):
                    break
        return {
            "rollouts": seen,
            "takes_part": self._topology.takes_part,
            "writes": self._topology.is_writer,
            "pid": os.getpid(),
        }

    def _one(
        self, actor: Any, train: Any, rollout_id: int, boxes: Any, more: Any, trigger: Trigger, last: bool
    ) -> dict[str, Any]:
        self._reset(actor)
        error = None
        # Training makes circles of its own. Without collections in between, as many are there every time.
        gc.collect()
        gc.disable()
        with _listening() as heard:
            began = time.monotonic()
            try:
                train(rollout_id, boxes, **more)
            except Exception as caught:
                error = _describe(caught)
                traceback.print_exc()  # to the stage's log, in case this run hangs
            seconds = time.monotonic() - began
        stale = self._stale()  # what lives on here lives on in a training run
        time.sleep(0.03)  # gloo's own thread may still hold what the last collective worked on
        tensors = _live_tensors()
        gc.enable()
        report = {
            "rollout": rollout_id,
            "seconds": round(seconds, 3),
            "fired": trigger.fired,
            "error": error,
            "stale": stale,
            "heard": heard,
            "weights": self._fingerprint(),
            "tensors": tensors,
            **_counts(),
        }
        if not last:  # else a rank may have left, or hang in a collective of the training
            self._meet()
            if self.rank == 0:
                folder = Path(self.args.save_debug_train_data).parent
                report["files"] = {path.name: _digest(path.read_bytes()) for path in _dumps_in(folder)}
                report["journal"] = _journal_of(folder, rollout_id)
            self._meet()
        return report

    def _reset(self, actor: Any) -> None:
        """Weights and optimizer as at the start: then each rollout is the same in every scenario."""
        with torch.no_grad():
            for tensor, initial in zip(self._parameters, self._initial, strict=True):
                tensor.copy_(initial)
        for optimizer in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer]):
            optimizer.optimizer.state.clear()
        actor.weights_backuper.backup("actor")  # which slime may put back before it trains

    def _fingerprint(self) -> str:
        digest = hashlib.sha256()
        for tensor in self._parameters:
            digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def _stale(self) -> list[str]:
        from slime_instrument._hooks import capture, loading

        found = []
        if capture.current_session() is not None:
            found.append("a session is current")
        if capture.policy_loss() is not None:
            found.append("a policy loss is marked as running")
        if loading.LOADS.current() is not None:
            found.append("a load is marked as running")
        if type(sys.modules["slime.utils.data"].ray) is loading.WatchedRay:
            found.append("ray is still replaced")
        if len(self._sessions):
            found.append(f"{len(self._sessions)} session(s) alive")
        loss = sys.modules["slime.backends.megatron_utils.loss"]
        if getattr(loss, "_LOG_PROB_CAPTURE", None) is not None:
            found.append("slime's own capture is not drained")
        return found

    def _meet(self) -> None:
        """Wait for the other ranks by way of the store: no process group of the training is touched."""
        store, key = self._store, f"fault-matrix/{self._meetings}"
        self._meetings += 1
        store.add(key, 1)
        while store.add(key, 0) < torch.distributed.get_world_size():
            time.sleep(0.005)


def _dumps_in(folder: Path) -> list[Path]:
    """What stands there beside the journal."""
    return sorted(path for path in folder.iterdir() if path.name != "instrument.jsonl")


def _journal_of(folder: Path, rollout_id: int) -> list[str]:
    """What the journal says of a rollout, oldest first."""
    from slime_instrument._format.journal import NAME, read_journal

    if not (folder / NAME).is_file():
        return []
    return [entry.state for entry in read_journal(folder).rollouts if entry.rollout_id == rollout_id]


def _look_for_aliases_in_slime_only() -> None:
    """Arming afresh for every scenario walks through all modules otherwise, which is most of a scenario's time."""
    from slime_instrument._patching import apply

    def namespaces() -> Iterator[dict[str, Any]]:
        for name, module in list(sys.modules.items()):
            if name.startswith("slime"):
                yield vars(module)

    apply._namespaces = namespaces


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """The warnings and errors that slime_instrument logs meanwhile, one line each."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(f"{record.levelname}: {record.getMessage().splitlines()[0]}")

    ear, logger = Ear(logging.WARNING), logging.getLogger("slime_instrument")
    logger.addHandler(ear)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield heard
    finally:
        logger.removeHandler(ear)
        logger.propagate = propagates


def _describe(error: BaseException) -> dict[str, Any]:
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_frame.f_code.co_name}")
        trace = trace.tb_next
    return {
        "type": type(error).__name__,
        "text": str(error)[:300],
        "cause": type(error.__cause__).__name__ if error.__cause__ is not None else None,
        "context": type(error.__context__).__name__ if error.__context__ is not None else None,
        "frames": frames,
    }


def _live_tensors() -> list[int]:
    """Number and bytes of the tensors that came to life since scenarios began and are still there."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    return [len(tensors), sum(tensor.untyped_storage().nbytes() for tensor in tensors)]


def _counts() -> dict[str, Any]:
    import slime_instrument

    found = list(slime_instrument.status())
    return {
        "failures": {patch.name: patch.failures for patch in found if patch.failures},
        "states": {patch.name: patch.state for patch in found if patch.state not in ("ACTIVE", "SKIPPED", "PENDING")},
    }


def _digest(content: bytes) -> str:
    """Of the whole file, and behind a colon of the payload without provenance, where there is one."""
    whole = hashlib.sha256(content).hexdigest()[:16]
    try:
        payload = torch.load(io.BytesIO(content), weights_only=True)
        for shard in payload["dp_shards"]:
            del shard["provenance"]
    except Exception:
        return f"{whole}:"
    core = io.BytesIO()
    torch.save(payload, core)
    return f"{whole}:{hashlib.sha256(core.getvalue()).hexdigest()[:16]}"
