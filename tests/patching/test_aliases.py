"""Names bound with ``from x import y``, and holders that no repointing reaches."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import pytest

from slime_instrument._patching.patcher import Patcher

from .world import World, patch, same, tagging

Make = Callable[..., Patcher]

TARGET = "def function(a): return a\nclass Thing:\n    def method(self, a): return a\n"


def test_aliases_made_before_and_after_arming_are_repaired_and_restored(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)
    early = world.make("early", "from target import function as f\nfrom target import *")
    before = world.snapshot()
    ours = patcher(patch("target:function", tagging("seen")))
    ours.arm()
    late = world.make("late", "from target import function as g\nfrom early import f")
    assert [early.f(1), early.function(1), late.g(1), late.f(1)] == [("seen", 1)] * 4
    # The dict is this test's own snapshot.
    assert ours.records["it"].reason == "wrapped, 2 alias(es) repointed; not reached: a dict"
    ours.disarm()
    assert late.g is late.f is early.f is target.function
    assert same(before, {name: names for name, names in world.snapshot().items() if name in before})
    assert late.g(1) == 1


def test_an_alias_that_its_owner_bound_to_something_else_meanwhile_is_left_alone(world: World, patcher: Make) -> None:
    world.make("target", TARGET)
    user = world.make("user", "from target import function")
    ours = patcher(patch("target:function", tagging("seen")))
    ours.arm()
    user.function = mine = lambda a: "mine"
    ours.disarm()
    assert user.function is mine


def test_a_module_level_name_of_a_method_is_repaired_too(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET + "method = Thing.method\n")
    before = world.snapshot()
    ours = patcher(patch("target:Thing.method", tagging("seen")))
    ours.arm()
    assert target.method(None, 1) == ("seen", 1)
    ours.disarm()
    assert same(before, world.snapshot())


HOLDERS = {
    "closure": (
        "def make():\n    from target import function as f\n    return lambda a: f(a)\nheld = make()",
        "a closure of holder.make.<locals>.<lambda>",
    ),
    "partial": ("import functools, target\nheld = functools.partial(target.function, 1)", "a functools.partial of"),
    "default": ("import target\ndef held(a, f=target.function): return f(a)", "a default of holder.held"),
    "keyword default": ("import target\ndef held(a, *, f=target.function): return f(a)", "a default of holder.held"),
    "list": ("import target\nheld = [target.function]", "a list"),
    "tuple": ("import target\nheld = (target.function, [])", "a tuple"),
    "dict": ("import target\nheld = {'policy_loss': target.function}", "a dict"),
    "set": ("import target\nheld = {target.function}", "a set"),
    "class": ("import target\nclass Held:\n    f = staticmethod(target.function)", "a staticmethod"),
    "class attribute": ("import target\nclass Held:\n    f = target.function", "a class in holder"),
    "instance": ("import target\nclass Held: pass\nheld = Held()\nheld.f = target.function", "holder.Held|a dict"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_holder_that_cannot_be_reached_is_reported_when_arming_late(world: World, patcher: Make, kind: str) -> None:
    source, expected = HOLDERS[kind]
    world.make("target", TARGET)
    world.make("holder", source)
    ours = patcher(patch("target:function", tagging("seen")))
    ours.arm()
    reason = ours.records["it"].reason
    assert "not reached: " in reason
    assert any(text in reason for text in expected.split("|")), reason


def test_a_bound_method_that_somebody_kept_is_reported(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)
    held = target.Thing().method
    ours = patcher(patch("target:Thing.method", tagging("seen")))
    ours.arm()
    assert ours.records["it"].reason == "wrapped; not reached: a bound method"
    assert held(1) == 1


@pytest.mark.parametrize("attribute", ["function", "Thing.method"])
def test_nobody_is_reported_when_nobody_holds_the_original(world: World, patcher: Make, attribute: str) -> None:
    world.make("target", TARGET)
    world.make("user", "from target import function, Thing\nclass Sub(Thing): pass")
    ours = patcher(patch(f"target:{attribute}", tagging("seen")))
    ours.arm()
    assert "not reached" not in ours.records["it"].reason


def test_a_lazily_loaded_module_is_not_loaded_by_looking_for_aliases(world: World, patcher: Make) -> None:
    world.make("target", TARGET)
    world.write("sleeper", "raise SystemError('woken up')")
    spec = importlib.util.find_spec("sleeper")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    sys.modules["sleeper"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ours = patcher(patch("target:function", tagging("seen")))
    ours.arm()
    ours.disarm()
    assert object.__getattribute__(module, "__class__").__name__ == "_LazyModule"


def test_odd_objects_among_the_modules_are_passed_over(
    world: World, patcher: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trap:
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError(name)

    monkeypatch.setitem(sys.modules, "trap_module", Trap())
    monkeypatch.setitem(sys.modules, "none_module", None)
    target = world.make("target", TARGET)
    ours = patcher(patch("target:function", tagging("seen")))
    ours.arm()
    assert target.function(1) == ("seen", 1)
    ours.disarm()
    assert functools.reduce(lambda x, _: x, [target.function])(1) == 1
