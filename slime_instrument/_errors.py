"""The exceptions of this package, the five parts of a refusal, and the one way to the log.

Each exception also is the builtin that callers already catch. Standard library only: this module is loaded before
slime, torch or wrapt may be.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType

__all__ = [
    "DumpError",
    "DumpFormatError",
    "InstrumentError",
    "SettingsError",
    "TrainingPathError",
    "contained",
    "describe",
    "five_parts",
    "log",
    "not_ours",
    "traceback_text",
]


class InstrumentError(Exception):
    """Base of every error that slime_instrument raises on purpose."""


class SettingsError(InstrumentError, ValueError):
    """A ``SLIME_INSTRUMENT_*`` variable has a value that cannot be used. Raised when arming or when training starts."""


class TrainingPathError(InstrumentError, ValueError):
    """The path of the train dump cannot work for this run. Raised when training starts, before the first rollout."""


class DumpError(InstrumentError, RuntimeError):
    """A dump could not be made. Raised into training in strict mode only; otherwise logged once and counted."""


class DumpFormatError(InstrumentError, ValueError):
    """A file is not a dump that this package can read, or is not safe to read."""


def five_parts(subject: str, *, expected: str, found: str, follows: str, next_step: str) -> str:
    """Build an error message: subject, what was expected, what was found, what follows, what to do next.

    >>> print(five_parts("SLIME_INSTRUMENT_EVERY", expected="a whole number above 0", found="'often'",
    ...                  follows="Nothing was armed.", next_step="Set it to 1 to dump every rollout."))
    slime_instrument: SLIME_INSTRUMENT_EVERY: expected a whole number above 0, found 'often'. Nothing was armed. \
Set it to 1 to dump every rollout.
    """
    return f"slime_instrument: {subject}: expected {expected}, found {found}. {follows} {next_step}"


def describe(error: BaseException) -> str:
    """Type and message of ``error``. Never raises: the message of somebody else's exception is somebody else's code."""
    try:
        text = str(error)
    except Exception as failed:
        text = f"(its message cannot be shown: str() raises {type(failed).__name__})"
    if len(text) > _MOST_SHOWN:  # it goes to the log, the journal and the other ranks
        text = f"{text[:_MOST_SHOWN]} … ({len(text)} characters in all)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_MOST_SHOWN = 2000


def traceback_text(error: BaseException) -> str:
    """The traceback of ``error`` as Python prints it. Never raises; :func:`describe` stands in."""
    try:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()
    except Exception as failed:
        return f"{describe(error)} (its traceback cannot be shown: {type(failed).__name__})"


def release(error: BaseException) -> None:
    """Let go of what the frames of an error that is kept for a while hold, and those of the errors it came from."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__


def not_ours(error: BaseException) -> bool:
    """Whether ``error`` was thrown into our code from outside and must reach the caller, as it would without us.

    Python runs signal handlers wherever the main thread happens to be, and ``PyThreadState_SetAsyncExc`` raises there;
    a watchdog of the user's may so raise in the middle of our work. Every ``except Exception`` of ours asks this first.
    Two things give such an exception away: a frame of its traceback is a signal handler (it was handed the very frame
    that it interrupted, or it is the code of a handler that is installed now), or its class is the user's while no code
    of the user's was called. An exception of a builtin class set by ``PyThreadState_SetAsyncExc`` cannot be told from a
    failure of ours and counts as one.
    """
    if not isinstance(error, Exception):
        return True
    called_theirs = False
    installed: set[CodeType] | None = None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if not _is_known(frame.f_globals.get("__name__")):
            if installed is None:
                installed = _codes_of_signal_handlers()
            if frame.f_code in installed:
                return True
            called_theirs = True
        # Not in frames of ours: looking at the locals of the one that caught the error would keep the error alive.
        if not _is_ours(frame.f_globals.get("__name__")) and _was_handed_the_frame_it_interrupted(frame):
            return True
        trace = trace.tb_next
    return not called_theirs and not _is_known(type(error).__module__)


@contextlib.contextmanager
def contained(tell: Callable[[str], object] = lambda _why: None) -> Iterator[None]:
    """What fails in the block goes no further; ``tell`` gets it in words. What is :func:`not_ours` passes through."""
    try:
        yield
    except Exception as error:
        if not_ours(error):
            raise
        tell(describe(error))


def _was_handed_the_frame_it_interrupted(frame: FrameType) -> bool:
    """Whether ``frame`` is a handler called as ``handler(number, interrupted frame)``."""
    code, interrupted = frame.f_code, frame.f_back
    if interrupted is None:
        return False
    flags = bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # CO_VARARGS, CO_VARKEYWORDS
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + flags]
    for name in names:
        value = frame.f_locals.get(name)
        if value is interrupted or (type(value) is tuple and any(item is interrupted for item in value)):
            return True
    return False


def _codes_of_signal_handlers() -> set[CodeType]:
    """For handlers that let go of the frame they were handed."""
    codes = set()
    for number in signal.valid_signals():
        handler: object = signal.getsignal(number)
        for _ in range(8):  # partials of bound methods of callable objects, and what decorators made of them
            if isinstance(handler, functools.partial):
                handler = handler.func
            elif isinstance(handler, MethodType):
                handler = handler.__func__
            elif isinstance(handler, FunctionType):
                codes.add(handler.__code__)
                handler = getattr(handler, "__wrapped__", None)
            elif callable(handler) and not isinstance(handler, (type, BuiltinFunctionType)):
                handler = getattr(type(handler), "__call__", None)  # noqa: B004  # the function is wanted
            else:
                break
    return codes


def _is_ours(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == "slime_instrument"


def _is_known(module: object) -> bool:
    """Whether code or an exception class of that module is ours, torch's or the standard library's."""
    if not isinstance(module, str):
        return True
    top = module.partition(".")[0]
    return top in _KNOWN or top in sys.stdlib_module_names


_KNOWN = frozenset({"slime_instrument", "torch", "wrapt", "numpy"})


_logger = logging.getLogger("slime_instrument")


def log(level: int, message: str, *arguments: object) -> None:
    """Log ``message % arguments`` at ``level``; the one way to the log for everything that runs inside training.

    Handlers and filters are the user's code: what one of them raises stays here and ends no training.
    """
    try:
        _logger.log(level, message, *arguments)
    except Exception as error:
        if not_ours(error):
            raise
