"""Messages have five parts; exceptions are the builtins that callers already catch; what is not ours is let through."""

from __future__ import annotations

import ctypes
import functools
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slime_instrument import _errors as errors
from slime_instrument._errors import describe, log, not_ours, traceback_text
from slime_instrument._patching.failures import FailurePolicy


def test_a_message_has_its_five_parts_in_order() -> None:
    text = errors.five_parts("x", expected="a", found="b", follows="C.", next_step="D.")
    assert text == "slime_instrument: x: expected a, found b. C. D."


@pytest.mark.parametrize(
    ("ours", "builtin"),
    [
        (errors.SettingsError, ValueError),
        (errors.TrainingPathError, ValueError),
        (errors.DumpError, RuntimeError),
        (errors.DumpFormatError, ValueError),
    ],
)
def test_each_error_is_ours_and_the_builtin(ours: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(ours, errors.InstrumentError)
    assert issubclass(ours, builtin)


# ---------------------------------------------------------------- what was thrown into our code from outside


class Watchdog(Exception):
    """The user's own class."""


def of_ours(source: str, **names: Any) -> Callable[[], Any]:
    """A function that looks like one of this package: ``source`` is the body of ``work()``."""
    body = "\n".join("    " + line for line in source.splitlines())
    namespace: dict[str, Any] = {"__name__": "slime_instrument._dump.made_for_a_test", "time": time, **names}
    exec(compile(f"def work():\n{body}\n", "made_for_a_test", "exec"), namespace)
    work: Callable[[], Any] = namespace["work"]
    return work


def caught(work: Callable[[], Any]) -> tuple[Exception, bool]:
    """What ``work`` raises, caught as code of ours catches it, and whether it is not ours."""
    catch = of_ours(
        "try:\n    task()\nexcept Exception as error:\n    return error, not_ours(error)", task=work, not_ours=not_ours
    )
    found: tuple[Exception, bool] = catch()
    return found


def by_function(raised: Any) -> Any:
    def bite(number: int, frame: Any) -> None:
        raise raised

    return bite


def by_anything(raised: Any) -> Any:
    def bite(*_: Any) -> None:
        raise raised

    return bite


def by_forgetful_function(raised: Any) -> Any:
    def bite(number: int, frame: Any) -> None:
        frame = None  # noqa: F841  # what it was handed is gone
        raise raised

    return bite


def by_method(raised: Any) -> Any:
    class Owner:
        def bite(self, number: int, frame: Any) -> None:
            raise raised

    return Owner().bite


def by_callable_object(raised: Any) -> Any:
    class Handler:
        def __call__(self, number: int, frame: Any) -> None:
            del frame
            raise raised

    return Handler()


def by_partial(raised: Any) -> Any:
    def bite(extra: str, number: int, frame: Any) -> None:
        raise raised

    return functools.partial(bite, "extra")


def by_decorated_function(raised: Any) -> Any:
    def inner(number: int, frame: Any) -> None:
        raise raised

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    return outer


def by_a_function_it_calls(raised: Any) -> Any:
    def deeper() -> None:
        raise raised

    return lambda number, frame: deeper()


def by_throwing_lambda(raised: Any) -> Any:
    def throw() -> Iterator[None]:
        raise raised
        yield

    return lambda *_: next(throw())


HANDLERS = [
    by_function, by_anything, by_forgetful_function, by_method, by_callable_object, by_partial, by_decorated_function,
    by_a_function_it_calls, by_throwing_lambda,
]  # fmt: skip


@pytest.fixture
def alarm() -> Iterator[Callable[[Any], None]]:
    """Installs a signal handler that is called in 50 ms, once."""
    before = signal.getsignal(signal.SIGUSR1)
    me = threading.get_ident()
    called_off = threading.Event()

    def strike() -> None:
        if not called_off.wait(0.05):
            signal.pthread_kill(me, signal.SIGUSR1)

    striking = threading.Thread(target=strike)

    def install(handler: Any) -> None:
        signal.signal(signal.SIGUSR1, handler)
        striking.start()

    yield install
    called_off.set()
    striking.join()
    signal.signal(signal.SIGUSR1, before)


LOOP = "end = time.monotonic() + 5\nwhile time.monotonic() < end:\n    pass"


@pytest.mark.parametrize("raised", [Watchdog, TimeoutError("builtin"), ValueError("builtin")], ids=repr)
@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("busy", [LOOP, "time.sleep(5)"], ids=["computing", "in C code"])
def test_what_a_signal_handler_raises_is_not_ours(
    alarm: Callable[[Any], None], handler: Any, raised: Any, busy: str
) -> None:
    alarm(handler(raised))
    error, outside = caught(of_ours(busy))
    assert isinstance(error, raised if isinstance(raised, type) else type(raised))
    assert outside


def test_a_handler_that_strikes_while_we_report_or_look_is_not_ours(alarm: Callable[[Any], None]) -> None:
    def slow_handler(_record: logging.LogRecord) -> bool:
        time.sleep(5)
        return True

    logger = logging.getLogger("slime_instrument")
    logger.addFilter(slow_handler)
    try:
        alarm(by_function(TimeoutError))
        with pytest.raises(TimeoutError):
            log(logging.ERROR, "anything")
    finally:
        logger.removeFilter(slow_handler)


def set_in_this_thread(kind: type[BaseException]) -> None:
    """Have ``kind`` raised in this thread by another one, as libraries with time limits do."""
    me = ctypes.c_ulong(threading.get_ident())

    def strike() -> None:
        time.sleep(0.05)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(me, ctypes.py_object(kind))

    threading.Thread(target=strike, daemon=True).start()


def test_an_exception_of_the_users_that_another_thread_sets_is_not_ours() -> None:
    set_in_this_thread(Watchdog)
    error, outside = caught(of_ours(LOOP))
    assert isinstance(error, Watchdog)
    assert outside


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_is_no_exception_is_never_ours(kind: type[BaseException]) -> None:
    assert not_ours(kind())


def users_code() -> None:
    raise Watchdog("a failure in code of the user's that we called")


@pytest.mark.parametrize(
    "work",
    [
        of_ours("1 / 0"),
        of_ours("raise DumpError('no')", DumpError=errors.DumpError),
        of_ours("import torch\ntorch.zeros(2) + torch.zeros(3)"),
        of_ours("import json\njson.loads('{')"),
        of_ours("open('/nonexistent/file')"),
        of_ours("users_code()", users_code=users_code),
        of_ours("sorted([2, 1], key=lambda _: users_code())", users_code=users_code),
    ],
    ids=["builtin", "our own class", "torch", "standard library", "the system", "user's code", "user's code below C"],
)
def test_what_fails_in_our_own_work_is_ours(work: Callable[[], Any]) -> None:
    assert not caught(work)[1]


def test_a_handler_that_is_installed_and_not_what_raised_changes_nothing() -> None:
    before = signal.signal(signal.SIGUSR1, by_function(Watchdog))
    try:
        assert not caught(of_ours("users_code()", users_code=users_code))[1]
        assert not caught(of_ours("1 / 0"))[1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_looking_at_an_error_does_not_keep_it_alive() -> None:
    class Held:
        pass

    import gc
    import weakref

    alive: list[Any] = []

    def fail() -> None:
        held = Held()
        alive.append(weakref.ref(held))
        raise ValueError

    gc.disable()
    try:
        of_ours("try:\n    fail()\nexcept Exception as error:\n    not_ours(error)", fail=fail, not_ours=not_ours)()
        assert alive[0]() is None
    finally:
        gc.enable()


# ---------------------------------------------------------------- reporting never raises


class NoText(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class NoRepr(NoText):
    def __repr__(self) -> str:
        raise ZeroDivisionError


class OddNotes(Exception):
    @property
    def __notes__(self) -> Any:
        raise ZeroDivisionError


class NoClass(Exception):
    @property
    def __class__(self) -> Any:
        raise ZeroDivisionError

    @__class__.setter
    def __class__(self, value: Any) -> None: ...


def circle() -> Exception:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    return one


HOSTILE: list[Callable[[], Exception]] = [
    NoText, NoRepr, OddNotes, NoClass, circle, lambda: ValueError(NoRepr()), lambda: KeyError(NoRepr()),
]  # fmt: skip


@pytest.mark.parametrize("make", HOSTILE)
def test_any_error_can_be_described_and_shown(make: Callable[[], Exception]) -> None:
    error = make()
    assert type(error).__name__ in describe(error)
    assert type(error).__name__ in traceback_text(error)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("make", HOSTILE)
def test_any_error_can_be_reported(make: Callable[[], Exception], strict: bool) -> None:
    policy = FailurePolicy(lambda: strict, limit=2)
    error = make()
    if strict:
        with pytest.raises(errors.DumpError) as raised:
            policy.report("it", error, "Nothing is lost.")
        assert raised.value.__cause__ is error
    else:
        assert [policy.report("it", error, "Nothing is lost.") for _ in range(2)] == [False, True]


class Refuses(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise PermissionError("no log today")


def refuse(_record: logging.LogRecord) -> bool:
    raise PermissionError("no log today")


@pytest.mark.parametrize("how", ["handler", "filter"])
def test_a_log_handler_that_raises_stays_without_effect(how: str) -> None:
    logger, handler = logging.getLogger("slime_instrument"), Refuses()
    add, remove = (
        (logger.addHandler, logger.removeHandler) if how == "handler" else (logger.addFilter, logger.removeFilter)
    )
    thing: Any = handler if how == "handler" else refuse
    add(thing)
    try:
        log(logging.ERROR, "%s", "anything")
        assert FailurePolicy(lambda: False, limit=1).report("it", ValueError("no"), "") is True
    finally:
        remove(thing)


def test_a_listener_that_fails_is_logged_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def listener(where: str, error: BaseException, for_good: bool) -> None:
        raise NoText

    policy = FailurePolicy(lambda: False, limit=1, listener=listener)
    assert policy.report("it", ValueError("no"), "") is True
    assert any("after it failed" in record.getMessage() for record in caplog.records)


def test_a_dump_error_never_adds_up_to_stepping_out(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[bool] = []
    policy = FailurePolicy(lambda: False, limit=1, listener=lambda where, error, for_good: heard.append(for_good))
    for number in range(5):
        assert policy.report("it", errors.DumpError(f"disk full {number}"), "Lost.") is False
    assert heard == [False] * 5
    assert len([r for r in caplog.records if "disk full" in r.getMessage()]) == 5
    assert policy.report("it", ValueError("ours"), "Lost.") is True
