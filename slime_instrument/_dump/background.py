"""Writing off the critical path: at most one file is pending, and none is forgotten.

The thread is no daemon, so an interpreter that ends by itself waits for it. What is left is a process that is told to
end: while a file is pending, a SIGTERM that nobody else handles waits for it too. SIGKILL and ``os._exit`` cannot be
helped; then the file is missing, never half there.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

__all__ = ["BackgroundWriter", "Report"]


class Report(Protocol):
    """How a failure is dealt with: ``FailurePolicy.report``."""

    def __call__(self, where: str, error: BaseException, lost: str, *, may_raise: bool = True) -> Any: ...


class BackgroundWriter:
    """Does one piece of work at a time on a thread of its own. ``report`` gets what went wrong there, on the thread
    that finds out: at the next dump, or at exit."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lost = ""
        self._at_exit = False

    @property
    def pending(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def submit(self, work: Callable[[], None], lost: str) -> None:
        """Start ``work`` once the work before it has ended. ``lost``: what is lost when it fails, as a sentence."""
        self.flush()
        if not self._at_exit:
            atexit.register(self.flush, may_raise=False)
            self._at_exit = True
        self._lost = lost
        thread = threading.Thread(target=self._run, args=(work,), name="slime_instrument-write", daemon=False)
        try:
            thread.start()
        except RuntimeError:  # no thread can be had, such as while the interpreter ends
            self._run(work)
            self.flush()
            return
        self._thread = thread
        self._hold_termination()

    def flush(self, *, may_raise: bool = True) -> None:
        """Wait for the pending work, and report its failure if it has one."""
        thread = self._thread
        if thread is not None:
            thread.join()  # forgotten only afterwards: a signal may come while this waits
            self._thread = None
            self._release_termination()
        error, self._error = self._error, None
        if error is not None:
            self._report("asynchronous writing", error, self._lost, may_raise=may_raise)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def _hold_termination(self) -> None:
        # Anybody's own handler stays: it ends the process in a way that waits for threads (Ray's raises SystemExit), or
        # means that the process shall go on.
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminate)

    def _release_termination(self) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        # Bound methods are made anew at each access, so they are equal but not the same.
        if in_main and signal.getsignal(signal.SIGTERM) == self._terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _terminate(self, number: int, _frame: FrameType | None) -> None:
        """Finish the file, then end as if nobody had handled the signal."""
        self.flush(may_raise=False)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
