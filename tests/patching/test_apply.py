"""Putting a patch on, and taking exactly it off again."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import wrapt

from slime_instrument._patching.patcher import Patcher

from .world import World, doing, patch, same, tagging

Make = Callable[..., Patcher]

TARGET = """
    def function(a, b=2):
        return a + b

    class Base:
        def inherited(self, a):
            return a

    class Thing(Base):
        def method(self, a, *, b=1):
            return a + b
"""
USER = "from target import function\nfrom target import function as other, Thing\n"


@pytest.mark.parametrize("order", list(itertools.permutations(["import", "arm", "use"])), ids=" ".join)
@pytest.mark.parametrize("attribute", ["function", "Thing.method", "Thing.inherited"])
def test_every_dict_is_as_before_whatever_the_order(
    world: World, patcher: Make, attribute: str, order: tuple[str, ...]
) -> None:
    world.write("target", TARGET)
    world.write("user", USER)
    ours = patcher(patch(f"target:{attribute}", tagging("seen")))
    before: Any = None
    for step in order:
        if step == "import":
            world.load("user")
        elif step == "arm":
            before = world.snapshot() if "user" in sys.modules else None
            ours.arm()
        elif "user" in sys.modules:
            world.load("user").other(1)
            world.load("user").Thing().inherited(1)
    ours.disarm()
    after = world.snapshot()
    if before is None:  # armed first: compare with a world that never was
        assert vars(world.load("user"))["other"] is vars(world.load("target"))["function"]
        assert not any(isinstance(v, wrapt.BaseObjectProxy) for names in after.values() for v in names.values())
        assert "inherited" not in after["target.Thing"]
        before = after
    assert same(before, after)
    ours.arm()
    ours.disarm()
    assert same(before, world.snapshot())


def test_a_function_a_method_and_an_inherited_method_are_all_reached(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)
    thing = target.Thing()  # made before arming
    patcher(
        patch("target:function", tagging("f"), name="f"),
        patch("target:Thing.method", tagging("m"), name="m"),
        patch("target:Thing.inherited", tagging("i"), name="i"),
    ).arm()
    assert target.function(1) == ("f", 3)
    assert thing.method(1, b=5) == ("m", 6)
    assert thing.inherited(7) == ("i", 7)
    assert target.Base().inherited(7) == 7  # the base class itself is left alone


def test_an_attribute_that_a_module_makes_on_demand_is_not_left_behind(world: World, patcher: Make) -> None:
    target = world.make(
        "target",
        "def _f(): return 1\ndef __getattr__(name):\n    if name == 'lazy': return _f\n    raise AttributeError(name)",
    )
    before = world.snapshot()
    ours = patcher(patch("target:lazy", tagging("seen")))
    ours.arm()
    assert target.lazy() == ("seen", 1)
    ours.disarm()
    assert same(before, world.snapshot())
    assert "lazy" not in vars(target)


def test_the_first_alternative_that_exists_is_taken(world: World, patcher: Make) -> None:
    world.write("old_home", "def function(a): return a")
    world.write("new_home", "def unrelated(a): return a")
    ours = patcher(patch("new_home:function old_home:function", tagging("seen"), takes=("a",)))
    ours.arm()
    world.load("new_home")
    assert ours["it"].state == "PENDING"
    assert world.load("old_home").function(1) == ("seen", 1)
    assert str(ours["it"].target) == "old_home.function"


def test_only_one_of_two_alternatives_is_wrapped(world: World, patcher: Make) -> None:
    world.make("old_home", "def function(a): return a")
    world.make("new_home", "def function(a): return a")
    patcher(patch("new_home:function old_home:function", tagging("seen"))).arm()
    assert world.load("new_home").function(1) == ("seen", 1)
    assert world.load("old_home").function(1) == 1


@pytest.mark.parametrize(
    ("source", "attribute", "reason"),
    [
        ("x = 1", "function", "target has no function"),
        ("class Thing: pass", "Thing.method", "target has no Thing.method"),
        ("def function(a): pass", "function", "target.function takes (a); expected also rollout_id, keys"),
        ("function = 3", "function", "target.function is a int; expected a plain function"),
        ("class function: pass", "function", "target.function is a type; expected a plain function"),
        (
            "class T:\n @staticmethod\n def f(rollout_id, keys): pass",
            "T.f",
            "target.T.f is a staticmethod; expected a plain function",
        ),
        ("class T:\n @property\n def f(self): pass", "T.f", "target.T.f is a property; expected a plain function"),
    ],
)
def test_what_does_not_fit_is_incompatible_and_the_reason_names_it(
    world: World, patcher: Make, source: str, attribute: str, reason: str
) -> None:
    world.make("target", source)
    before = world.snapshot()
    ours = patcher(patch(f"target:{attribute}", takes=("rollout_id", "keys")))
    ours.arm()
    assert (str(ours["it"].state), ours["it"].reason) == ("INCOMPATIBLE", reason)
    assert same(before, world.snapshot())


def test_the_reason_names_every_alternative_that_was_looked_at(world: World, patcher: Make) -> None:
    world.make("one", "def function(a): pass")
    world.make("two", "")
    ours = patcher(patch("one:function two:function", takes=("b",)))
    ours.arm()
    assert ours["it"].reason == "one.function takes (a); expected also b; two has no function"


@pytest.mark.parametrize(
    "source", ["def function(**kwargs): return kwargs", "def function(*, a, b=2): return dict(a=a, b=b)"]
)
def test_keyword_only_and_open_signatures_fit(world: World, patcher: Make, source: str) -> None:
    target = world.make("target", source)
    seen: list[Any] = []
    patcher(
        patch(
            "target:function",
            doing(before=lambda call: seen.append((call["a"], call.get("b", "default")))),
            takes=("a",),
        )
    ).arm()
    target.function(a=1)
    target.function(a=1, b=9)
    assert seen == [(1, "default"), (1, 9)]


def test_a_keyword_only_parameter_is_never_read_from_the_extra_positional_ones(world: World, patcher: Make) -> None:
    target = world.make("target", "def function(a, *more, b=2): return a, more, b")
    seen: list[Any] = []
    look = doing(before=lambda call: seen.append(call.get("b", "default")))
    patcher(patch("target:function", look, takes=("a", "b"))).arm()
    assert target.function(1, 7, 8) == (1, (7, 8), 2)
    assert seen == ["default"]


# ---------------------------------------------------------------- another tool's wrapper on top of ours


def plain_wrapper(below: Any) -> Any:
    @functools.wraps(below)
    def on_top(*args: Any, **kwargs: Any) -> Any:
        return ("top", below(*args, **kwargs))

    return on_top


def wrapt_wrapper(below: Any) -> Any:
    return wrapt.FunctionWrapper(below, lambda wrapped, instance, args, kwargs: ("top", wrapped(*args, **kwargs)))


@pytest.mark.parametrize("attribute", ["function", "Thing.method"])
@pytest.mark.parametrize("tool", [plain_wrapper, wrapt_wrapper])
def test_a_wrapper_put_on_top_of_ours_is_reported_and_survives_our_removal(
    world: World, patcher: Make, tool: Any, attribute: str
) -> None:
    target = world.make("target", TARGET)
    holder, name = (target, "function") if attribute == "function" else (target.Thing, "method")
    call = (lambda: target.function(1, b=2)) if attribute == "function" else (lambda: target.Thing().method(1, b=2))
    original = vars(holder)[name]
    ours = patcher(patch(f"target:{attribute}", tagging("ours")))
    ours.arm()
    setattr(holder, name, tool(vars(holder)[name]))
    top = vars(holder)[name]
    assert call() == ("top", ("ours", 3))
    ours.look_for_drift()
    assert str(ours["it"].state) == "DRIFTED"
    assert "was wrapped again" in ours["it"].reason
    ours.disarm()
    assert call() == ("top", 3)
    assert vars(holder)[name] is top
    if tool is wrapt_wrapper:
        assert top.__wrapped__ is original
        assert "removed from below" in ours["it"].reason
    else:
        assert "made inert below" in ours["it"].reason


def test_two_wrapt_wrappers_on_top_are_kept_and_ours_is_taken_out_from_below_both(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)
    original = target.function
    ours = patcher(patch("target:function", tagging("ours")))
    ours.arm()
    target.function = wrapt_wrapper(wrapt_wrapper(target.function))
    ours.disarm()
    assert target.function(1) == ("top", ("top", 3))
    assert target.function.__wrapped__.__wrapped__ is original


def test_a_wrapper_below_ours_stays(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)
    target.function = below = wrapt_wrapper(target.function)
    ours = patcher(patch("target:function", tagging("ours")))
    ours.arm()
    assert target.function(1) == ("ours", ("top", 3))
    ours.disarm()
    assert target.function is below


def test_when_the_wrapper_on_top_goes_away_the_patch_is_active_again(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)
    ours = patcher(patch("target:function", tagging("ours")))
    ours.arm()
    ours_wrapper = target.function
    target.function = plain_wrapper(ours_wrapper)
    ours.look_for_drift()
    target.function = ours_wrapper
    ours.look_for_drift()
    assert str(ours["it"].state) == "ACTIVE"
    target.function = lambda a, b=2: "somebody else's"
    ours.look_for_drift()
    assert str(ours["it"].state) == "DRIFTED"
    assert "bypassed" in ours["it"].reason


def test_a_replaced_target_is_drifted_and_stays_replaced_after_removal(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)
    ours = patcher(patch("target:function", tagging("ours")))
    ours.arm()
    target.function = replacement = lambda a: "new"
    ours.look_for_drift()
    assert "was replaced by" in ours["it"].reason
    ours.disarm()
    assert target.function is replacement
    assert ours["it"].reason == "removed; the target had been replaced"


def test_a_deleted_target_is_drifted_and_stays_deleted(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)
    ours = patcher(patch("target:function", tagging("ours")))
    ours.arm()
    del target.function
    ours.look_for_drift()
    assert ours["it"].reason == "target.function is gone; this patch is bypassed"
    ours.disarm()
    assert not hasattr(target, "function")


def test_arming_again_never_acts_twice_although_an_old_wrapper_is_still_called(world: World, patcher: Make) -> None:
    target = world.make("target", TARGET)
    ours = patcher(patch("target:function", tagging("ours")))
    ours.arm()
    below = target.function
    target.function = lambda a, b=2: below(a, b)  # a wrapper that does not say what it wraps
    ours.arm()
    assert target.function(1) == ("ours", 3)
    assert ours["it"].calls == 1


# ---------------------------------------------------------------- reload


@pytest.mark.parametrize("attribute", ["function", "Thing.method", "Thing.inherited"])
@pytest.mark.parametrize("how", ["reload", "delete and import"])
def test_a_reloaded_module_is_drifted_and_arming_again_patches_it(
    world: World, patcher: Make, attribute: str, how: str
) -> None:
    import importlib

    old = world.make("target", TARGET)
    old_class = old.Thing
    before = dict(vars(old_class))
    ours = patcher(patch(f"target:{attribute}", tagging("ours")))
    ours.arm()
    if how == "reload":
        new = importlib.reload(old)
    else:
        del sys.modules["target"]
        new = world.load("target")
    ours.look_for_drift()
    assert (str(ours["it"].state), "bypassed" in ours["it"].reason) == ("DRIFTED", True)
    fresh = world.snapshot()
    ours.arm()
    assert str(ours["it"].state) == "ACTIVE"
    calls: dict[str, Callable[[], Any]] = {
        "function": lambda: new.function(1, 1),
        "Thing.method": lambda: new.Thing().method(1),
        "Thing.inherited": lambda: new.Thing().inherited(2),
    }
    assert calls[attribute]() == ("ours", 2)
    ours.disarm()
    assert same(fresh, world.snapshot())
    assert dict(vars(old_class)) == before
