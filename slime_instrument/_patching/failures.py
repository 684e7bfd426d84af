"""What happens when a piece of this package fails inside somebody's training run."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable

from slime_instrument._errors import DumpError, SettingsError, TrainingPathError

__all__ = ["REFUSALS", "FailurePolicy"]

logger = logging.getLogger("slime_instrument")

REFUSALS = (SettingsError, TrainingPathError)
"""Errors of the user's configuration: refused when training starts, in lenient mode too."""


class FailurePolicy:
    """Lenient: log once per reason, count, go on, step out after ``limit`` failures in a row. Strict: raise."""

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
        self.total = 0

    def report(self, where: str, error: BaseException, lost: str, *, may_raise: bool = True) -> bool:
        """Deal with ``error``. Returns True when ``where`` failed so often that it should step out.

        In strict mode raises :class:`DumpError` from ``error``, unless ``may_raise`` is False (an exception of the
        target itself is on its way and must not be covered). Refusals always pass through.
        """
        refused = isinstance(error, REFUSALS) and may_raise
        try:
            if refused:
                raise error
            return self._report(where, error, lost, may_raise)
        finally:
            # The exception may leave through this frame. Held here it would form a circle with its own traceback, and
            # keep what the failed call held until the garbage is collected.
            del error

    def _report(self, where: str, error: BaseException, lost: str, may_raise: bool) -> bool:
        with self._lock:
            self.total += 1
            self._in_a_row[where] = self._in_a_row.get(where, 0) + 1
            reason = (where, f"{type(error).__name__}: {error}")
            first, often = reason not in self._logged, self._in_a_row[where] >= self._limit
            self._logged.add(reason)
        self._listener(where, error, often)
        if self._strict() and may_raise:
            try:
                if isinstance(error, DumpError):
                    raise error
                raise DumpError(f"slime_instrument: {where} failed: {error}. {lost}") from error
            finally:
                del error
        if first:
            # As text: a log handler that keeps its records would keep every tensor of the traceback's frames, too.
            trace = "" if isinstance(error, DumpError) else "\n" + "".join(traceback.format_exception(error)).rstrip()
            logger.error(
                "slime_instrument: %s failed: %s. %s Training goes on. "
                "SLIME_INSTRUMENT_STRICT=1 makes this an error.%s",
                where, reason[1], lost, trace,
            )  # fmt: skip
        return often

    def succeeded(self, where: str) -> None:
        """``where`` worked: failures are counted in a row."""
        if where in self._in_a_row:
            with self._lock:
                self._in_a_row.pop(where, None)
