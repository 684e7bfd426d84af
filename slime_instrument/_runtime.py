"""Arming this process, and the one :class:`~slime_instrument._state.Runtime` that it then has."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from slime_instrument._activation import waiting
from slime_instrument._patching.declaration import State
from slime_instrument._patching.remarks import remarks
from slime_instrument._patching.status import PatchStatus, Status
from slime_instrument._state import Runtime

__all__ = ["Runtime", "arm_quietly", "current", "instrument", "instrumented", "status", "uninstrument"]

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
        waits_as = waiting.route()
        if _current is None or not _current.patcher.armed:
            fresh = Runtime(waits_as or route, _current)
            fresh.refuse_bad_settings()
            _current = fresh
        _current.refuse_bad_settings()
        waiting.cancel()  # what it waited for is done here
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
        waiting.cancel()
        if _current is not None:
            if _current.patcher.armed:
                _current.step_out()
            _current.patcher.disarm()


@contextmanager
def instrumented(route: str = "instrumented()") -> Iterator[None]:
    """Armed inside the block, taken off at its end whatever happens. Inside an armed process it changes nothing."""
    already = waiting.is_waiting() or (_current is not None and _current.patcher.armed)
    instrument(route)
    try:
        yield
    finally:
        if not already:
            uninstrument()


def status() -> Status:
    """A snapshot: whether and how this process is armed, and one record per patch."""
    waits_as = waiting.route()
    # Armed, but nothing is loaded before slime is: what would be armed is looked at without arming it.
    runtime = _current if _current is not None and waits_as is None else Runtime(waits_as or "")
    runtime.patcher.look_for_drift()
    trained = any(record.calls for record in runtime.patcher if record.patch.group == "dump")
    remarked = remarks(runtime.patcher, trained=trained)
    patches = []
    for record in runtime.patcher:
        if waits_as is not None:
            record.become(State.PENDING, "waiting for the import of slime")
        shown = record.as_dict()
        if record.patch.name in remarked:
            shown["reason"] += f"; {remarked[record.patch.name]}"
        patches.append(PatchStatus(**{key: shown[key] for key in PatchStatus.__dataclass_fields__}))
    failure = str(runtime.settings_error) if runtime.settings_error is not None else None
    armed = runtime.patcher.armed or waits_as is not None
    return Status(armed, runtime.route, runtime.settings.as_dict(), tuple(patches), failure)
