"""What happens when a piece of this package fails inside somebody's training run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from slime_instrument._errors import (
    DumpError,
    SettingsError,
    TrainingPathError,
    describe,
    log,
    not_ours,
    traceback_text,
)

REFUSALS = (SettingsError, TrainingPathError)
"""Errors of the user's configuration: refused when training starts, in lenient mode too."""


class FailurePolicy:
    """Lenient: log once per reason, count, go on, step out after ``limit`` failures in a row. Strict: raise.

    Only faults of ours count. A :class:`DumpError` is none: a full disk, a peer that gave up, data that do not fit are
    logged each for what they cost, and never add up to stepping out.
    """

    def __init__(
        self,
        strict: Callable[[], bool],
        limit: int = 3,
        listener: Callable[[str, BaseException, bool], None] = lambda where, error, for_good: None,
    ) -> None:
        """``listener(where, error, for_good)`` hears of every failure before it is logged or raised."""
        self._strict = strict
        self._listener = listener
        self._limit = limit
        self._logged: set[tuple[str, str]] = set()
        self._in_a_row: dict[str, int] = {}
        self._lock = threading.Lock()

    def report(self, where: str, error: BaseException, lost: str, *, may_raise: bool = True) -> bool:
        """Deal with ``error``. Returns True when ``where`` failed so often that it should step out.

        In strict mode raises :class:`DumpError` from ``error``, unless ``may_raise`` is False (an exception of the
        target itself is on its way and must not be covered). Refusals always pass through. Nothing else is raised,
        whatever the error's own ``str()``, the listener or a log handler does.
        """
        try:
            if issubclass(type(error), REFUSALS) and may_raise:
                raise error
            return self._report(where, error, lost, may_raise)
        finally:
            # The exception may leave through this frame. Held here it would form a circle with its own traceback, and
            # keep what the failed call held until the garbage is collected.
            del error

    def _report(self, where: str, error: BaseException, lost: str, may_raise: bool) -> bool:
        ours = not issubclass(type(error), DumpError)
        text = describe(error)  # outside the lock: it runs the error's own code
        with self._lock:
            if ours:
                self._in_a_row[where] = self._in_a_row.get(where, 0) + 1
            first, for_good = (where, text) not in self._logged, self._in_a_row.get(where, 0) >= self._limit
            self._logged.add((where, text))
        self._tell_listener(where, error, ours and for_good)
        if self._strict() and may_raise:
            try:
                if not ours:
                    raise error
                raise DumpError(f"slime_instrument: {where} failed: {text}. {lost}") from error
            finally:
                del error
        if first:
            # As text: a log handler that keeps its records would keep every tensor of the traceback's frames, too.
            trace = "\n" + traceback_text(error) if ours else ""
            log(
                logging.ERROR,
                "slime_instrument: %s failed: %s. %s Training goes on. "
                "SLIME_INSTRUMENT_STRICT=1 makes this an error.%s",
                where, text, lost, trace,
            )  # fmt: skip
        return ours and for_good

    def _tell_listener(self, where: str, error: BaseException, for_good: bool) -> None:
        try:
            self._listener(where, error, for_good)
        except Exception as another:
            if not_ours(another):
                raise
            log(logging.ERROR, "slime_instrument: after %s failed: %s", where, traceback_text(another))

    def succeeded(self, where: str) -> None:
        """``where`` worked: failures are counted in a row."""
        if where in self._in_a_row:
            with self._lock:
                self._in_a_row.pop(where, None)
