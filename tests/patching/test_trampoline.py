"""A wrapped call: the target runs exactly once, and what it does comes through whatever we do."""

from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slime_instrument._errors import DumpError, SettingsError, TrainingPathError
from slime_instrument._patching.patch import Call
from slime_instrument._patching.patcher import Patcher

from .world import World, doing, patch, tagging

Make = Callable[..., Patcher]

TARGET = """
    calls = []

    class TargetError(Exception):
        pass

    def function(a, keys=(), *, fail=False):
        calls.append(a)
        if fail:
            raise TargetError(a)
        return a
"""


def broken(*_: Any) -> Any:
    raise ZeroDivisionError("ours")


STEPS = ["before", "after", "cleanup", "idle"]


def step_patch(where: str, **more: Any) -> Any:
    if where == "idle":
        return patch("target:function", tagging("seen"), idle=broken, **more)
    return patch("target:function", doing(**{where: broken}), **more)


@pytest.mark.parametrize("where", STEPS)
def test_a_failing_step_of_ours_never_changes_the_result(world: World, patcher: Make, where: str) -> None:
    target = world.make("target", TARGET)
    patcher(step_patch(where)).arm()
    assert target.function("x") == "x"
    assert target.calls == ["x"]


@pytest.mark.parametrize("where", STEPS)
def test_strict_mode_raises_our_own_type_chained_to_what_failed(world: World, patcher: Make, where: str) -> None:
    target = world.make("target", TARGET)
    patcher(step_patch(where), strict=True).arm()
    with pytest.raises(DumpError, match="it failed: ZeroDivisionError: ours") as raised:
        target.function("x")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert len(target.calls) == (1 if where in ("after", "cleanup") else 0)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("where", ["after", "cleanup"])
def test_the_targets_own_exception_is_never_masked(world: World, patcher: Make, where: str, strict: bool) -> None:
    target = world.make("target", TARGET)
    ours = patcher(step_patch(where), strict=strict)
    ours.arm()
    with pytest.raises(target.TargetError) as raised:
        target.function("x", fail=True)
    assert target.calls == ["x"]
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None
    assert traceback.extract_tb(raised.value.__traceback__)[-1].name == "function"
    assert ours["it"].failures == (1 if where == "cleanup" else 0)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exception_of_the_target_comes_through_as_the_same_object(world: World, patcher: Make, strict: bool) -> None:
    target = world.make("target", TARGET)
    ran: list[str] = []
    patcher(patch("target:function", doing(cleanup=lambda call: ran.append("cleanup"))), strict=strict).arm()
    with pytest.raises(target.TargetError, match="x"):
        target.function("x", fail=True)
    assert ran == ["cleanup"]


@pytest.mark.parametrize("exit_type", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exit_on_its_way_runs_the_cleanup_and_goes_on(world: World, patcher: Make, exit_type: Any) -> None:
    target = world.make("target", "def function(kind): raise kind()")
    ran: list[str] = []
    patcher(patch("target:function", doing(cleanup=lambda call: ran.append("cleanup")))).arm()
    with pytest.raises(exit_type):
        target.function(exit_type)
    assert ran == ["cleanup"]


@pytest.mark.parametrize("error", [SettingsError("bad setting"), TrainingPathError("bad path")])
def test_a_refusal_passes_in_lenient_mode_too(world: World, patcher: Make, error: Exception) -> None:
    target = world.make("target", TARGET)

    def refuse(call: Call) -> None:
        raise error

    patcher(patch("target:function", doing(before=refuse))).arm()
    with pytest.raises(type(error)) as raised:
        target.function("x")
    assert raised.value is error
    assert target.calls == []


def test_arguments_can_be_exchanged_wherever_they_were_passed(world: World, patcher: Make) -> None:
    target = world.make("target", "def function(a, keys=(), **more): return a, keys, more")
    patcher(patch("target:function", doing(before=lambda call: call.__setitem__("keys", ["new"])))).arm()
    assert target.function(1, ["old"]) == (1, ["new"], {})
    assert target.function(1, keys=["old"]) == (1, ["new"], {})
    assert target.function(1) == (1, ["new"], {})
    assert target.function(a=1, other=2) == (1, ["new"], {"other": 2})


def test_an_argument_left_to_its_default_is_a_key_error(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)
    seen: list[Any] = []

    def look(call: Call) -> None:
        seen.append(call.get("keys", "default"))
        with pytest.raises(KeyError, match="keys"):
            call["keys"]

    patcher(patch("target:function", doing(before=look))).arm()
    target.function(1)
    assert seen == ["default"]


def test_instead_takes_the_place_of_the_target(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)
    patcher(patch("target:function", instead=lambda call: "ours")).arm()
    assert (target.function(1), target.calls) == ("ours", [])


@pytest.mark.parametrize("where", STEPS)
def test_a_step_that_keeps_failing_steps_out_although_other_steps_work(
    world: World, patcher: Make, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    target = world.make("target", TARGET)
    ours = patcher(step_patch(where), limit=3)
    ours.arm()
    for _ in range(2):
        target.function(1)
    assert str(ours["it"].state) == "ACTIVE"
    target.function(1)
    assert str(ours["it"].state) == "FAILED"
    assert ours["it"].reason == "failed 3 times, last: ZeroDivisionError: ours"
    assert target.function("x") == "x"  # as if we were not there
    assert ours["it"].failures == 3
    assert len([r for r in caplog.records if "it failed" in r.message]) == 1  # logged once


def test_failures_are_counted_in_a_row(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)

    def sometimes(call: Call) -> None:
        if call.result == "bad":
            raise ValueError(call.result)

    ours = patcher(patch("target:function", doing(after=sometimes)), limit=3)
    ours.arm()
    for a in ["bad", "bad", "good", "bad", "bad", "good"]:
        assert target.function(a) == a
    assert (str(ours["it"].state), ours["it"].failures) == ("ACTIVE", 4)


def test_each_reason_is_logged_once_with_what_is_lost(
    world: World, patcher: Make, caplog: pytest.LogCaptureFixture
) -> None:
    target = world.make("target", TARGET)

    def fail(call: Call) -> None:
        raise ValueError(call["a"])

    patcher(patch("target:function", doing(before=fail), on_failure="The moon is lost."), limit=9).arm()
    for a in ["one", "two", "one", "two"]:
        target.function(a)
    logged = [record.getMessage() for record in caplog.records]
    assert [("ValueError: one" in text, "ValueError: two" in text) for text in logged] == [(True, False), (False, True)]
    assert all("The moon is lost. Training goes on." in text and "SLIME_INSTRUMENT_STRICT=1" in text for text in logged)


@pytest.mark.parametrize("step", ["instead", "idle"])
def test_what_takes_the_targets_place_keeps_it_after_it_failed(world: World, patcher: Make, step: str) -> None:
    target = world.make("target", TARGET)
    ours = patcher(patch("target:function", **{"instead": lambda call: 1, step: broken}), limit=1)
    ours.arm()
    assert [target.function(1), target.function(1)] == [None, None]
    assert (target.calls, str(ours["it"].state)) == ([], "FAILED")
    ours.disarm()
    assert target.function(1) == 1


def test_the_target_runs_after_all_when_what_takes_its_place_does_not_want_the_call(
    world: World, patcher: Make
) -> None:
    target = world.make("target", TARGET)
    ours = patcher(patch("target:function", instead=lambda call: NotImplemented if call["a"] == 1 else "ours"))
    ours.arm()
    assert [target.function(1), target.function(2)] == [1, "ours"]
    assert (target.calls, ours["it"].calls) == ([1], 2)


def test_a_hook_that_returns_before_its_yield_leaves_the_call_alone(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)

    def hook(call: Call) -> Iterator[None]:
        call["a"] = "exchanged"
        if call["keys"]:
            yield
        call.result = "seen"

    ours = patcher(patch("target:function", hook))
    ours.arm()
    assert target.function("x", keys=[]) == "x"
    assert target.function("x", keys=[1]) == "seen"
    assert target.calls == ["x", "exchanged"]
    assert ours["it"].failures == 0


@pytest.mark.parametrize("strict", [False, True])
def test_a_hook_that_yields_twice_is_a_failure_and_is_closed(world: World, patcher: Make, strict: bool) -> None:
    target = world.make("target", TARGET)
    closed: list[int] = []

    def hook(call: Call) -> Iterator[None]:
        try:
            yield
            yield
        finally:
            closed.append(1)

    ours = patcher(patch("target:function", hook), strict=strict)
    ours.arm()
    if strict:
        with pytest.raises(DumpError, match="yields more than once"):
            target.function("x")
    else:
        assert target.function("x") == "x"
    assert (target.calls, closed, ours["it"].failures) == (["x"], [1], 1)


def test_a_result_that_was_exchanged_before_the_hook_failed_is_the_targets_own(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)

    def half(call: Call) -> None:
        call.result = "half done"
        raise ZeroDivisionError

    patcher(patch("target:function", doing(after=half))).arm()
    assert target.function("x") == "x"


def test_the_hook_is_not_told_what_the_target_raised_and_cannot_swallow_it(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)
    seen: list[BaseException] = []

    def hook(call: Call) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            seen.append(error)

    patcher(patch("target:function", hook)).arm()
    with pytest.raises(target.TargetError):
        target.function("x", fail=True)
    assert [type(error) for error in seen] == [GeneratorExit]


def test_hooks_get_what_the_patcher_was_given_for_them(world: World) -> None:
    target = world.make("target", TARGET)
    seen: list[Any] = []
    ours = Patcher([patch("target:function", doing(before=lambda call: seen.append(call.process)))], process="mine")
    ours.arm()
    target.function("x")
    ours.disarm()
    assert seen == ["mine"]


def test_re_entrant_calls_each_get_their_own_advice(world: World, patcher: Make) -> None:
    target = world.make("target", "def function(n):\n    return 1 if n == 0 else n * function(n - 1)\n")
    depth: list[int] = []
    patcher(patch("target:function", doing(cleanup=lambda call: depth.append(call["n"])))).arm()
    assert target.function(3) == 6
    assert depth == [0, 1, 2, 3]


def test_taking_the_patch_off_from_inside_a_call_lets_the_call_finish(world: World, patcher: Make) -> None:
    target = world.make("target", "def function(then): then(); return 'done'")
    original = target.function
    ours = patcher(patch("target:function", tagging("seen")))
    ours.arm()
    assert target.function(ours.disarm) == ("seen", "done")
    assert target.function is original


def test_calls_from_many_threads_all_come_through(world: World, patcher: Make) -> None:
    target = world.make("target", "def function(a): return a")

    def pair(call: Call) -> None:
        call.result = (call["a"], call.result)

    patcher(patch("target:function", doing(after=pair))).arm()
    wrong: list[Any] = []

    def work(n: int) -> None:
        wrong.extend(i for i in range(200) if target.function((n, i)) != ((n, i), (n, i)))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# ---------------------------------------------------------------- what other code may do with a wrapped function


@pytest.fixture
def wrapped(world: World, patcher: Make) -> Any:
    target = world.make(
        "target",
        'def function(a: int, *, b: str = "x") -> bool:\n    "Says."\n    return (a, b)\n'
        "class Thing:\n    def method(self, a): return a\n",
    )
    patcher(
        patch("target:function", tagging("seen"), name="f"), patch("target:Thing.method", tagging("seen"), name="m")
    ).arm()
    return target


def test_a_wrapped_function_looks_like_the_original(wrapped: Any) -> None:
    assert str(inspect.signature(wrapped.function)) == "(a: int, *, b: str = 'x') -> bool"
    assert str(inspect.signature(wrapped.Thing.method)) == "(self, a)"
    assert (wrapped.function.__name__, wrapped.function.__doc__, wrapped.function.__module__) == (
        "function",
        "Says.",
        "target",
    )
    assert inspect.isfunction(wrapped.Thing.method)
    assert "return (a, b)" in inspect.getsource(wrapped.function)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_brings_back_the_very_same_functions(wrapped: Any, protocol: int) -> None:
    for thing in (wrapped.function, wrapped.Thing.method, wrapped.Thing().method.__func__):
        assert pickle.loads(pickle.dumps(thing, protocol)) is thing
    assert pickle._loads(pickle._dumps(wrapped.function, protocol)) is wrapped.function  # type: ignore[attr-defined]


def test_copies_are_the_very_same_functions(wrapped: Any) -> None:
    assert copy.copy(wrapped.function) is copy.deepcopy([wrapped.function])[0] is wrapped.function
    assert copy.deepcopy(wrapped.Thing.method) is wrapped.Thing.method


def test_what_unpickles_it_needs_nothing_of_ours_and_gets_the_original(wrapped: Any, world: World) -> None:
    data = pickle.dumps(wrapped.function)
    assert b"slime_instrument" not in data
    program = "import pickle, sys; f = pickle.loads(bytes.fromhex(sys.argv[1]))\n"
    program += "print(f(1), 'slime_instrument' in sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program, data.hex()], cwd=world.folder, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "(1, 'x') False\n"


def test_a_wrapper_that_outlived_its_patch_pickles_as_what_stands_there_now(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)
    ours = patcher(patch("target:function"))
    ours.arm()
    kept = [target.function]
    ours.disarm()
    assert pickle.loads(pickle.dumps(kept))[0] is target.function
    assert kept[0] is not target.function


def test_cloudpickle_ships_it_by_name_and_closures_over_it_too(wrapped: Any) -> None:
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    function = wrapped.function
    assert pickle.loads(cloudpickle.dumps(function)) is function
    assert pickle.loads(cloudpickle.dumps(lambda: function(1)))() == ("seen", (1, "x"))
    assert pickle.loads(cloudpickle.dumps(wrapped.Thing.method)) is wrapped.Thing.method
