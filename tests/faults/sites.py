"""The places where a fault is planted, each by its name, and how to plant it in a rank.

Four kinds. ``hook/<patch>/<step>``: a step of a patch raises, before or after its target. ``dump/<what>``: a function
of the dump raises. ``slime/<target>/<when>``: slime's own function raises, which must pass through us untouched.
``peer/<what>``: a rank sleeps or is killed in the middle of the dump, and the others must not wait for it for long.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["ALL", "SLEEP_S", "InjectedFault", "Site", "SlimeFault", "Trigger", "planted"]


SLEEP_S = 8.0
"""How long a late rank sleeps."""


class InjectedFault(RuntimeError):
    """Raised inside a piece of ours."""


class SlimeFault(RuntimeError):
    """Raised inside slime's own code."""


class Trigger:
    """Decides when a planted fault fires: while ``active``, at the ``nth`` call of a rollout (None: at every call)."""

    def __init__(self, site: Site, nth: int | None) -> None:
        self.site, self.nth = site, nth
        self.active = False
        self.calls = self.fired = 0

    def begin(self, active: bool) -> None:
        self.active, self.calls, self.fired = active, 0, 0

    def pull(self) -> None:
        if not self.active:
            return
        number, self.calls = self.calls, self.calls + 1
        if self.nth is None or number == self.nth:
            self.fired += 1
            if self.site.action == "sleep":
                time.sleep(SLEEP_S)
                return
            if self.site.action == "stop":
                subprocess.Popen(["sh", "-c", f"sleep {SLEEP_S}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
                return
            if self.site.action == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            kind = SlimeFault if self.site.kind == "slime" else InjectedFault
            raise kind(f"planted at {self.site.name}")


@dataclass(frozen=True)
class Site:
    """One place. ``phase``: ``load``, ``train`` (collectives of the training may be pending) or ``dump``.

    ``loses``: whether the rollout's dump is lost when it fires on a rank that takes part in the dump.
    ``per_batch``: called once for each micro-batch. ``who`` reaches it: ``all`` ranks, those of the ``last-stage``,
    those with a ``part`` in the dump, its ``writer``, or the others with a part (``sender``).
    """

    name: str
    phase: str
    loses: bool = True
    per_batch: bool = False
    where: tuple[str, str] = ("", "")
    before: bool = True
    who: str = "all"
    nth: int | None = None
    action: str = "raise"
    provenance: bool = False
    """The dump is written, and only its provenance lacks something."""

    @property
    def captures(self) -> bool:
        ours = ("hook/policy-loss", "hook/log-probs", "dump/collect")
        return self.name.startswith(ours)

    @property
    def kind(self) -> str:
        return self.name.split("/")[0]


def _hooks() -> Iterator[Site]:
    yield Site("hook/data-loader/before", "load")
    yield Site("hook/data-loader/after", "load")
    yield Site("hook/data-loader/cleanup", "load")
    yield Site("hook/train-actor/before", "train")
    yield Site("hook/train-actor/cleanup", "dump", loses=False)
    yield Site("hook/rollout-metrics/before", "train")
    yield Site("hook/rollout-metrics/cleanup", "train")
    yield Site("hook/optimizer-step/before", "train", loses=False, provenance=True)
    yield Site("hook/micro-batches/before", "train", per_batch=True)
    yield Site("hook/micro-batches/idle", "train", per_batch=True)
    yield Site("hook/policy-loss/before", "train", per_batch=True, who="last-stage")
    yield Site("hook/policy-loss/cleanup", "train", per_batch=True, who="last-stage")
    yield Site("hook/log-probs/before", "train", per_batch=True, who="last-stage")
    yield Site("hook/log-probs/after", "train", per_batch=True, who="last-stage")
    yield Site("hook/train-dump/before", "dump")
    yield Site("hook/train-dump/inside", "dump", where=("slime_instrument._hooks.dump", "_positions_from"))


_DUMP = "slime_instrument._dump"
_WRITE = (f"{_DUMP}.file", "Disk.write")


def _dump() -> Iterator[Site]:
    for name, module, function, who in (
        ("topology", f"{_DUMP}.agree", "read_topology", "all"),
        ("presence", f"{_DUMP}.agree", "Presence.absent", "part"),
        ("arrive", f"{_DUMP}.agree", "Agreement.arrive", "part"),
        ("wait-for-all", f"{_DUMP}.agree", "Agreement.wait_for_all", "writer"),
        ("go", f"{_DUMP}.agree", "Agreement.go", "writer"),
        ("wait-for-go", f"{_DUMP}.agree", "Agreement.wait_for_go", "sender"),
        ("listen", f"{_DUMP}.exchange", "_listening", "writer"),
        ("connect", f"{_DUMP}.exchange", "_connect", "sender"),
        ("collect", "slime_instrument._hooks.capture", "CaptureSession.collected", "part"),
        ("describe", f"{_DUMP}.payload", "provenance", "part"),
        ("contribute", f"{_DUMP}.contribute", "contribute", "part"),
        ("gather-pack", f"{_DUMP}.contribute", "_pieces_of", "part"),
        ("gather-send", f"{_DUMP}.exchange", "_send_piece", "sender"),
        ("gather-feed", f"{_DUMP}.exchange", "Receiver._take_some", "writer"),
        ("plan", f"{_DUMP}.payload", "put_together", "writer"),
        ("restore", f"{_DUMP}.payload", "_restored", "writer"),
        ("build", f"{_DUMP}.payload", "build_payload", "writer"),
        ("write", *_WRITE, "writer"),
        ("flush", "os", "fsync", "writer"),
        ("rename", "os", "replace", "writer"),
        ("rotate", f"{_DUMP}.file", "Rotation.wrote", "writer"),
    ):
        nth = 1 if name == "gather-send" else None  # the description is on its way
        yield Site(f"dump/{name}", "dump", loses=name != "rotate", where=(module, function), who=who, nth=nth)


def _slime() -> Iterator[Site]:
    megatron = "slime.backends.megatron_utils"
    for name, module, function, phase, per_batch in (
        ("load", "slime.utils.data", "process_rollout_data", "load", False),
        ("train-actor", f"{megatron}.actor", "MegatronTrainRayActor.train_actor", "train", False),
        ("metrics", f"{megatron}.data", "log_rollout_data", "train", False),
        ("optimizer-step", f"{megatron}.model", "train_one_step", "train", False),
        ("micro-batch", f"{megatron}.data", "DataIterator.get_next", "train", True),
        ("loss", f"{megatron}.loss", "policy_loss_function", "train", True),
    ):
        for before in (True, False):
            suffix = "before" if before else "after"
            who = "last-stage" if name == "loss" else "all"
            # What the trainer returns is returned after the dump.
            loses = (name, before) != ("train-actor", False)
            yield Site(f"slime/{name}/{suffix}", phase, loses, per_batch, (module, function), before, who)


def _peers() -> Iterator[Site]:
    contributing = (f"{_DUMP}.contribute", "contribute")
    sending, receiving = (f"{_DUMP}.exchange", "_send_piece"), (f"{_DUMP}.exchange", "Receiver._take_some")
    for name, where, who, nth in (
        ("before-agreeing", contributing, "part", None),
        ("before-sending", sending, "sender", 0),
        ("while-sending", sending, "sender", 1),
        ("while-receiving", receiving, "writer", 1),
        ("while-writing", _WRITE, "writer", None),
        ("before-renaming", ("os", "replace"), "writer", None),
    ):
        yield Site(f"peer/killed-{name}", "dump", where=where, who=who, nth=nth, action="kill")
    yield Site("peer/late", "dump", where=contributing, who="part", action="sleep")
    for action, verb in (("sleep", "stalls"), ("stop", "stopped")):
        yield Site(f"peer/{verb}-while-sending", "dump", where=sending, who="sender", nth=1, action=action)
        yield Site(f"peer/{verb}-while-receiving", "dump", where=receiving, who="writer", nth=1, action=action)


ALL: dict[str, Site] = {site.name: site for site in (*_hooks(), *_dump(), *_slime(), *_peers())}


@contextlib.contextmanager
def planted(trigger: Trigger) -> Iterator[None]:
    """Arm this process afresh with the fault in its place, and leave it unarmed and as it was.

    A fault of slime's own is planted before arming, so that it stands below our wrapper, as slime's code does.
    """
    import slime_instrument
    from slime_instrument import _runtime as runtime

    site = trigger.site
    slime_instrument.uninstrument()
    with contextlib.ExitStack() as undo:
        if site.kind == "slime":
            undo.enter_context(_replaced(*site.where, lambda original: _around(original, trigger, before=site.before)))
        _as_in_a_new_job(undo)
        slime_instrument.instrument("the fault matrix")
        undo.callback(slime_instrument.uninstrument)
        if site.kind == "hook" and not site.where[0]:
            _, patch, step = site.name.split("/")
            placement = runtime.current().patcher[patch]
            placement.patch = _with_fault(placement.patch, step, trigger.pull)
        elif site.where == _WRITE:
            undo.enter_context(_replaced(*site.where, lambda original: _torn_write(original, trigger)))
        elif site.kind in ("hook", "dump", "peer"):
            undo.enter_context(_replaced(*site.where, lambda original: _around(original, trigger, before=True)))
        yield


_jobs = 0


def _as_in_a_new_job(undo: contextlib.ExitStack) -> None:
    """Give the ranks an empty part of the store: the same rollouts come again in every scenario."""
    global _jobs
    from torch.distributed import distributed_c10d

    _jobs += 1
    name, real = f"fault-matrix-{_jobs}", distributed_c10d._get_default_store
    part = distributed_c10d.PrefixStore(name, real())
    undo.enter_context(_replaced(distributed_c10d.__name__, "_get_default_store", lambda _original: lambda: part))


def _with_fault(patch: Any, step: str, pull: Callable[[], None]) -> Any:
    """The declaration with one step that may raise: ``before`` in front of the hook, ``after`` in place of what stands
    behind its ``yield``, ``cleanup`` when all of it has run, whatever the target did."""
    if step == "idle":
        real_idle = patch.idle

        def idle() -> bool:
            pull()
            return bool(real_idle())

        # Only calls inside a session count, so that micro-batches are numbered alike on all ranks.
        return dataclasses.replace(patch, idle=lambda: real_idle() or idle())
    if patch.instead is not None:
        real_instead = patch.instead

        def instead(call: Any) -> Any:
            pull()
            return real_instead(call)

        return dataclasses.replace(patch, instead=instead)
    real = patch.around

    def around(call: Any) -> Iterator[None]:
        if step == "before":
            pull()
        hook = real(call)
        try:
            next(hook)
        except StopIteration:
            return
        returned = False
        try:
            yield
            if step == "after":
                pull()
            returned = True
        finally:
            if returned:
                next(hook, None)
            else:
                hook.close()
            if step == "cleanup":
                pull()

    return dataclasses.replace(patch, around=around)


def _around(original: Any, trigger: Trigger, *, before: bool) -> Any:
    if inspect.isgeneratorfunction(original):

        @functools.wraps(original)
        def stream(*args: Any, **kwargs: Any) -> Any:
            for item in original(*args, **kwargs):
                trigger.pull()
                yield item

        return stream

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if before:
            trigger.pull()
        result = original(*args, **kwargs)
        if not before:
            trigger.pull()
        return result

    return function


def _torn_write(original: Any, trigger: Trigger) -> Any:
    """Fails when half of the file is written."""

    @functools.wraps(original)
    def write(disk: Any, path: Any, fill: Any) -> Any:
        def torn(file: Any) -> None:
            if trigger.active:
                file.write(b"half a file")
            trigger.pull()
            fill(file)

        return original(disk, path, torn)

    return write


@contextlib.contextmanager
def _replaced(module_name: str, path: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put ``make(original)`` in its place and wherever else a module has bound it; afterwards put everything back."""
    from slime_instrument._patching.apply import repoint

    owner: Any = importlib.import_module(module_name)
    *parents, attribute = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = vars(owner)[attribute]
    replacement = make(original)
    setattr(owner, attribute, replacement)
    if not parents:
        repoint(original, replacement)
    try:
        yield
    finally:
        setattr(owner, attribute, original)
        if not parents:
            repoint(replacement, original)
