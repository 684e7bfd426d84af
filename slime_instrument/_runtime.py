"""The one object of an armed process, and the functions that arm, disarm and look at it."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slime_instrument import _hooks
from slime_instrument import _switch as switch
from slime_instrument._errors import DumpError, SettingsError, describe, log
from slime_instrument._hooks.capture import CaptureSession, Loaded, current_session
from slime_instrument._patching.failures import FailurePolicy
from slime_instrument._patching.patch import State, Status
from slime_instrument._patching.patcher import Patcher
from slime_instrument._settings import Settings

if TYPE_CHECKING:
    from slime_instrument._dump.dumper import Dumper

MOST_LOST_IN_A_ROW = 3
"""Rollouts that may lose their dump to faults of ours, one after the other, before this rank steps out."""


class Runtime:
    """An armed process: its settings, patches and dumps. ``route`` says how it was armed, in words.

    The hooks get it with each call, as their :class:`~slime_instrument._hooks.capture.Process`.
    """

    def __init__(self, route: str, earlier: Runtime | None = None) -> None:
        self.route = route
        self.settings_error: SettingsError | None = None
        try:
            self.settings = Settings.from_environment()
        except SettingsError as error:
            # Kept for the start of training: arming may happen where raising would only print a traceback.
            self.settings, self.settings_error = Settings(), error
        self.patcher: Patcher = Patcher(
            _hooks.HOOKS, FailurePolicy(lambda: self.settings.strict, listener=self._patch_failed), process=self
        )
        self._earlier_dumper: Dumper | None = None if earlier is None else earlier._made_dumper()
        self.args: Any = None
        self.loaded = Loaded()
        self.stepped_out: str | None = None
        """Why this rank makes no more dumps, once it does not."""
        self._failures: dict[str, str] = {}
        self._lost_in_a_row = 0

    @functools.cached_property
    def dumper(self) -> Dumper:
        """Made when training first asks for it, because it brings torch along, and slime may be imported without."""
        from slime_instrument._dump.dumper import Dumper
        from slime_instrument._live.watch import LiveMetrics

        # A policy of its own: a file that could not be written says nothing against the dump that finds out.
        policy = FailurePolicy(lambda: self.settings.strict)

        def report(where: str, error: BaseException, lost: str, *, may_raise: bool = True) -> None:
            self.patcher["train-dump"].failures += 1
            try:
                policy.report(where, error, lost, may_raise=may_raise)
            finally:
                del error  # see FailurePolicy.report

        return Dumper(self.settings, report, LiveMetrics(self.settings).after_dump, self._earlier_dumper)

    def _made_dumper(self) -> Dumper | None:
        """The newest dumper that there was, if any."""
        return self.dumper if "dumper" in self.__dict__ else self._earlier_dumper

    def refuse_bad_settings(self) -> None:
        """SettingsError naming the variable that has a bad value."""
        if self.settings_error is not None:
            raise self.settings_error

    def training_started(self, args: Any) -> None:
        """Megatron is up and all that slime imports has been imported: announce this rank, and log that we are in."""
        self.patcher.finalize()
        patches = self.patcher.snapshots()
        template = self.dumper.start(args, [(patch.name, patch.state, patch.reason) for patch in patches], self.route)
        active, skipped = (sum(patch.state == state for patch in patches) for state in (State.ACTIVE, State.SKIPPED))
        log(
            logging.INFO,
            "slime_instrument: armed by %s; %d patches active, %d not applied, %d in all; "
            "one train dump per rollout goes to %s",
            self.route, active, skipped, len(patches), template,
        )  # fmt: skip
        if not _is_rank_0():
            return  # what is wrong is the same on all ranks
        for patch in patches:
            if patch.state in (State.INCOMPATIBLE, State.FAILED, State.DRIFTED):
                log(logging.WARNING, "slime_instrument: %s is %s: %s", patch.name, patch.state, patch.reason)
        if self.settings.unknown:
            log(logging.WARNING, "slime_instrument: unknown settings ignored: %s", ", ".join(self.settings.unknown))

    def take_failures(self) -> dict[str, str]:
        """Patch name -> what failed there while no capture session was open; forgotten here afterwards."""
        taken, self._failures = self._failures, {}
        return taken

    def rollout_ended(self, session: CaptureSession) -> None:
        """The ``train_actor`` call of ``session`` is over."""
        self._lost_in_a_row = 0 if session.failure is None else self._lost_in_a_row + 1
        if self._lost_in_a_row >= MOST_LOST_IN_A_ROW:
            self.step_out(f"{self._lost_in_a_row} dumps in a row were lost to it, the last because {session.failure}")

    def step_out(self, reason: str) -> None:
        """Make no more dumps in this process, and tell the other ranks why, so that none waits for this one. slime's
        own dump stays out of place: it would write one file per rank in the middle of a run."""
        if self.stepped_out is not None:
            return
        self.stepped_out = reason
        self.dumper.step_out(reason)
        dump = self.patcher["train-dump"]
        if dump.state in (State.ACTIVE, State.DRIFTED):
            dump.fail_for_good(f"stepped out: {reason}")
        log(
            logging.ERROR,
            "slime_instrument: this rank makes no more train dumps in this run: %s. Training goes on. "
            "Please report it with the traceback above.",
            reason,
        )

    def disarm(self) -> None:
        if self.patcher.armed and self.stepped_out is None and "dumper" in self.__dict__:
            self.dumper.step_out("slime_instrument was taken off on this rank")
        self.patcher.disarm()

    def _patch_failed(self, where: str, error: BaseException, for_good: bool) -> None:
        """A hook failed: this rollout's dump is skipped as a whole. When the dump itself failed, the other ranks may be
        waiting in it; when something failed for good, they must not wait for this one any more."""
        patch, session = self.patcher[where].patch, current_session()
        if patch.optional:
            return
        text = f"{where} failed: {describe(error)}"
        if not isinstance(error, DumpError):
            # What fails while data are loaded concerns the rollout that trains next, also when another one trains now.
            if session is None or patch.group == "positions":
                self._failures.setdefault(where, text)
            else:
                session.fail(text)
        if session is not None and patch.instead is not None:
            self.dumper.give_up(session.rollout_id, text)
        if for_good:
            self.step_out(text)


def _is_rank_0() -> bool:
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0


_current: Runtime | None = None
_arming = threading.RLock()  # slime may be imported, and so armed, by several threads at once


def current() -> Runtime:
    """The runtime of this process. RuntimeError when it is not armed."""
    if _current is None:
        raise RuntimeError("slime_instrument is not armed in this process")
    return _current


def instrument(route: str = "instrument()") -> Status:
    """Arm this process. Idempotent; arming again re-applies what a module reload undid.

    Targets that are imported already are patched at once, the others when they are imported. Raises
    :class:`~slime_instrument._errors.SettingsError` naming the variable that has a bad value; nothing is armed then.
    """
    global _current
    with _arming:
        waits_as = switch.route()
        if _current is None or not _current.patcher.armed:
            fresh = Runtime(waits_as or route, _current)
            fresh.refuse_bad_settings()
            _current = fresh
        _current.refuse_bad_settings()
        switch.cancel()  # what it waited for is done here
        _current.patcher.arm()
    return status()


def arm_quietly(route: str) -> None:
    """Arm from a place that must not raise (interpreter start, an import): bad settings are kept and refused when
    training starts."""
    global _current
    with _arming:
        if _current is None or not _current.patcher.armed:
            _current = Runtime(route, _current)
        _current.patcher.arm()


def uninstrument() -> None:
    """Take every patch off: each module and class dict is as before, and a later import of slime arms nothing.
    Idempotent."""
    with _arming:
        switch.cancel()
        if _current is not None:
            _current.disarm()


@contextmanager
def instrumented(route: str = "instrumented()") -> Iterator[None]:
    """Armed inside the block, taken off at its end whatever happens. Inside an armed process it changes nothing."""
    already = switch.is_waiting() or (_current is not None and _current.patcher.armed)
    instrument(route)
    try:
        yield
    finally:
        if not already:
            uninstrument()


def status() -> Status:
    """A snapshot: whether and how this process is armed, and one record per patch."""
    waits_as = switch.route()
    # Armed, but nothing is loaded before slime is: what would be armed is looked at without arming it.
    runtime = _current if _current is not None and waits_as is None else Runtime(waits_as or "")
    patcher = runtime.patcher
    patcher.look_for_drift()
    if waits_as is not None:
        for placement in patcher:
            placement.set_state(State.PENDING, "waiting for the import of slime")
    trained = any(placement.calls for placement in patcher if placement.patch.group == "dump")
    patches = patcher.snapshots(used=trained)
    failure = str(runtime.settings_error) if runtime.settings_error is not None else None
    return Status(patcher.armed or waits_as is not None, runtime.route, runtime.settings.as_dict(), patches, failure)
