"""Hooks: when they fire, and that an import never pays for them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from slime_instrument._patching import apply as apply_module
from slime_instrument._patching.patch import Already, Target
from slime_instrument._patching.patcher import Patcher, on_import

from .world import World, patch, tagging

Make = Callable[..., Patcher]


def test_a_target_that_is_half_imported_is_patched_at_the_end_of_its_import(
    world: World, patcher: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = patcher(patch("target:function", tagging("seen")))
    states: list[str] = []

    def arm() -> None:
        ours.arm()
        states.append(str(ours["it"].state))

    monkeypatch.setattr(sys, "arm_for_test", arm, raising=False)
    world.write("target", "import sys\nsys.arm_for_test()\ndef function(a): return a\n")
    target = world.load("target")
    assert states == ["PENDING"]
    assert target.function(1) == ("seen", 1)
    assert type(target.__spec__).__name__ == "ModuleSpec"


def test_a_target_in_a_cycle_of_imports_is_patched_for_both_sides(
    world: World, patcher: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = patcher(patch("target:function", tagging("seen")))
    monkeypatch.setattr(sys, "arm_for_test", ours.arm, raising=False)
    world.write("target", "import user\ndef function(a): return a\n")
    world.write("user", "import sys\nsys.arm_for_test()\nimport target\ndef use(): return target.function(1)\n")
    world.load("target")
    assert world.load("user").use() == ("seen", 1)


@pytest.mark.parametrize("armed", ["before", "in the middle"])
def test_a_failing_import_fails_with_its_own_error_and_the_retry_is_patched(
    world: World, patcher: Make, monkeypatch: pytest.MonkeyPatch, armed: str
) -> None:
    ours = patcher(patch("target:function", tagging("seen")))
    monkeypatch.setattr(sys, "arm_for_test", ours.arm, raising=False)
    monkeypatch.setattr(sys, "target_is_broken", True, raising=False)
    if armed == "before":
        ours.arm()
    world.write(
        "target",
        """
        import sys
        sys.arm_for_test()
        def function(a): return a
        if sys.target_is_broken:
            raise LookupError("no CUDA")
        """,
    )
    with pytest.raises(LookupError, match="no CUDA"):
        world.load("target")
    assert str(ours["it"].state) == "PENDING"
    monkeypatch.setattr(sys, "target_is_broken", False)
    assert world.load("target").function(1) == ("seen", 1)


@pytest.mark.parametrize("broken", ["misfit", "apply", "look_at", "unless"])
def test_an_exception_in_a_hook_of_ours_never_reaches_the_import(
    world: World, patcher: Make, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("ours")

    import slime_instrument._patching.patcher as patcher_module

    more: dict[str, Any] = {}
    if broken == "unless":
        more["unless"] = Already(Target.parse("target:other"), "not needed")
    monkeypatch.setattr(patcher_module, "look_at" if broken == "unless" else broken, fail)
    ours = patcher(patch("target:function", tagging("seen"), **more), patch("target:other", name="other"))
    ours.arm()
    target = world.make("target", "def function(a): return a\ndef other(a): return a\n")
    assert target.function(1) == 1
    assert (str(ours["it"].state), ours["it"].reason) == (
        "FAILED",
        "could not be applied: ZeroDivisionError: ours",
    )


def test_a_patch_that_fails_half_way_leaves_nothing_behind(
    world: World, patcher: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = world.make("target", "def function(a): return a\n")
    user = world.make("user", "from target import function\n")
    original = target.function

    def repoint_then_fail(old: Any, new: Any) -> Any:
        monkeypatch.undo()
        user.function = new
        raise MemoryError

    monkeypatch.setattr(apply_module, "repoint", repoint_then_fail)
    ours = patcher(patch("target:function", tagging("seen")))
    ours.arm()
    assert target.function is user.function is original
    assert str(ours["it"].state) == "FAILED"


def test_a_hook_that_raises_is_logged_and_swallowed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    on_import("target", lambda module: module.nothing)
    world.make("target", "x = 1")
    assert "a hook for target failed; the import goes on" in caplog.text


def test_a_cancelled_wish_does_not_fire_and_a_fired_one_fires_once(world: World) -> None:
    fired: list[str] = []
    on_import("target", lambda module: fired.append("cancelled")).cancel()
    on_import("target", lambda module: fired.append(module.__name__))
    world.make("target", "x = 1")
    assert fired == ["target"]


def test_arming_and_disarming_before_the_import_leaves_the_target_alone(world: World, patcher: Make) -> None:
    ours = patcher(patch("target:function", tagging("seen")))
    for _ in range(3):
        ours.arm()
        ours.disarm()
    assert world.make("target", "def function(a): return a").function(1) == 1
    ours.arm()
    assert world.load("target").function(1) == ("seen", 1)


def test_targets_imported_by_many_threads_at_once_are_patched_once(world: World, patcher: Make) -> None:
    world.write("target", "import time\ntime.sleep(0.02)\ndef function(a): return a\n")
    ours = patcher(patch("target:function", tagging("seen")))
    ours.arm()
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(world.load("target").function(1))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [("seen", 1)] * 8
    assert ours["it"].calls == 8
