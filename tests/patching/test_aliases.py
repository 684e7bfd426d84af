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
    assert ours["it"].reason == "wrapped, 2 alias(es) repointed"
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
    "closure": "def make():\n    from target import function as f\n    return lambda a: f(a)\nheld = make()",
    "partial": "import functools, target\nheld = functools.partial(target.function)",
    "default": "import target\ndef held(a, f=target.function): return f(a)",
    "list": "import target\nkept = [target.function]\ndef held(a): return kept[0](a)",
    "instance": "import target\nclass Held: pass\nit = Held()\nit.f = target.function\ndef held(a): return it.f(a)",
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_a_holder_that_cannot_be_reached_keeps_calling_the_original_and_the_status_says_that_nothing_came(
    world: World, patcher: Make, kind: str
) -> None:
    world.make("target", TARGET)
    holder = world.make("holder", HOLDERS[kind])
    ours = patcher(patch("target:function", tagging("seen")))
    ours.arm()
    assert holder.held(1) == 1
    (seen,) = ours.snapshots(used=True)
    assert (seen.state, seen.calls) == ("ACTIVE", 0)
    assert "never called although training ran" in seen.reason
    assert "partial or closure made before arming" in seen.reason
    (unused,) = ours.snapshots()
    assert unused.reason == "wrapped"


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
