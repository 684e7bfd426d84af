"""What applies together or not at all, and what steps back with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slime_instrument._patching.patch import Already, Patch, Target
from slime_instrument._patching.patcher import Patcher

from .world import World, doing, patch, same, tagging

Make = Callable[..., Patcher]


def states(patcher: Patcher) -> dict[str, str]:
    return {each.patch.name: str(each.state) for each in patcher}


def two(*, second: str = "target:b", **more: Any) -> tuple[Patch, Patch]:
    return patch("target:a", tagging("a"), name="a"), patch(second, tagging("b"), name="b", **more)


AB = "def a(x): return x\ndef b(x): return x\n"


@pytest.mark.parametrize("order", ["arm first", "import first"])
def test_a_group_with_a_misfit_is_not_applied_at_all(world: World, patcher: Make, order: str) -> None:
    ours = patcher(*two(second="target:missing"))
    if order == "arm first":
        ours.arm()
    target = world.make("target", AB)
    before = world.snapshot()
    ours.arm()
    assert states(ours) == {"a": "SKIPPED", "b": "INCOMPATIBLE"}
    assert ours["a"].reason == "not applied without 'b'"
    assert target.a(1) == 1
    assert same(before, world.snapshot())


def test_a_member_whose_module_comes_later_reverts_those_already_applied(world: World, patcher: Make) -> None:
    ours = patcher(*two(second="later:missing"))
    ours.arm()
    target = world.make("target", AB)
    user = world.make("user", "from target import a")
    assert target.a(1) == ("a", 1)
    world.make("later", "")
    assert target.a(1) == user.a(1) == 1
    assert states(ours) == {"a": "SKIPPED", "b": "INCOMPATIBLE"}


def test_an_optional_patch_may_lack_its_target(world: World, patcher: Make) -> None:
    target = world.make("target", AB)
    ours = patcher(*two(second="target:missing", optional=True))
    ours.arm()
    assert states(ours) == {"a": "ACTIVE", "b": "INCOMPATIBLE"}
    assert target.a(1) == ("a", 1)


def test_an_optional_patch_steps_back_with_its_group(world: World, patcher: Make) -> None:
    target = world.make("target", AB)
    ours = patcher(patch("target:missing", name="a"), patch("target:b", tagging("b"), name="b", optional=True))
    ours.arm()
    assert states(ours) == {"a": "INCOMPATIBLE", "b": "SKIPPED"}
    assert target.b(1) == 1


def test_groups_that_need_a_broken_one_step_back_through_a_chain(world: World, patcher: Make) -> None:
    world.make("target", AB + "def c(x): return x\n")
    ours = patcher(
        patch("target:c", name="c", group="far", needs=("near",)),
        patch("target:b", name="b", group="near", needs=("base",)),
        patch("target:missing", name="a", group="base"),
        patch("target:a", name="free", group="free"),
    )
    ours.arm()
    assert states(ours) == {"c": "SKIPPED", "b": "SKIPPED", "a": "INCOMPATIBLE", "free": "ACTIVE"}
    assert ours["c"].reason == "not applied without 'a'"


def test_a_need_that_is_not_there_breaks_only_those_that_need_it(world: World, patcher: Make) -> None:
    world.make("target", AB)
    ours = patcher(patch("target:a", name="a", group="base"), patch("target:missing", name="b", needs=("base",)))
    ours.arm()
    assert states(ours) == {"a": "ACTIVE", "b": "INCOMPATIBLE"}


def test_a_patch_that_is_not_needed_breaks_nothing(world: World, patcher: Make) -> None:
    target = world.make("target", AB)
    ours = patcher(*two(unless=Already(Target.parse("target:a"), "slime does it itself")))
    ours.arm()
    assert states(ours) == {"a": "ACTIVE", "b": "SKIPPED"}
    assert ours["b"].reason == "slime does it itself"
    assert target.b(1) == 1


@pytest.mark.parametrize("second", ["target:b", "target:missing"])
def test_what_makes_a_patch_unnecessary_may_come_after_its_target(world: World, patcher: Make, second: str) -> None:
    """Whether the target fits is of no interest then, and what was applied already comes off."""
    ours = patcher(*two(second=second, group="own", unless=Already(Target.parse("later:c"), "slime does it itself")))
    ours.arm()
    target = world.make("target", AB)
    before = states(ours)["b"]
    world.make("later", "c = 1")
    assert before == ("ACTIVE" if second == "target:b" else "INCOMPATIBLE")
    assert states(ours) == {"a": "ACTIVE", "b": "SKIPPED"}
    assert ours["b"].reason == "slime does it itself"
    assert target.b(1) == 1
    ours.disarm()
    assert target.b(1) == 1


def test_a_patch_that_keeps_failing_takes_its_group_and_dependants_off(world: World, patcher: Make) -> None:
    target = world.make("target", AB + "def c(x): return x\n")
    before = world.snapshot()

    def fail(_: Any) -> None:
        raise ValueError("ours")

    ours = patcher(
        patch("target:a", tagging("a"), name="a"),
        patch("target:b", doing(before=fail), name="b"),
        patch("target:c", tagging("c"), name="c", group="dependant", needs=("g",)),
        limit=2,
    )
    ours.arm()
    assert (target.b(1), target.a(1), target.c(1)) == (1, ("a", 1), ("c", 1))
    target.b(1)
    assert states(ours) == {"a": "SKIPPED", "b": "FAILED", "c": "SKIPPED"}
    assert (target.b(1), target.a(1), target.c(1)) == (1, 1, 1)
    ours.disarm()
    assert same(before, world.snapshot())


def test_a_target_that_was_taken_over_stays_so_when_a_companion_fails_for_good(world: World, patcher: Make) -> None:
    target = world.make("target", AB)

    def fail(_: Any) -> None:
        raise ValueError("ours")

    ours = patcher(
        patch("target:a", doing(before=fail), name="a"),
        patch("target:b", instead=lambda call: "", name="b"),
        limit=1,
    )
    ours.arm()
    target.a(1)
    assert states(ours) == {"a": "FAILED", "b": "ACTIVE"}
    assert target.b(1) == ""


def test_stepping_back_from_inside_a_call_of_the_group_lets_the_call_finish(world: World, patcher: Make) -> None:
    target = world.make("target", "def inner(): return 'inner'\ndef outer(): return inner()\n")
    closed: list[str] = []

    def fail(_: Any) -> None:
        raise ValueError("ours")

    ours = patcher(
        patch("target:inner", doing(before=fail), name="inner"),
        patch("target:outer", doing(cleanup=lambda call: closed.append("closed")), name="outer"),
        limit=1,
    )
    ours.arm()
    assert target.outer() == "inner"
    assert closed == ["closed"]
    assert states(ours) == {"inner": "FAILED", "outer": "SKIPPED"}


def test_finalizing_makes_what_cannot_appear_any_more_incompatible(world: World, patcher: Make) -> None:
    target = world.make("target", AB)
    ours = patcher(*two(second="never_imported:b"))
    ours.arm()
    assert target.a(1) == ("a", 1)
    assert not ours.is_active("g")
    ours.finalize()
    assert states(ours) == {"a": "SKIPPED", "b": "INCOMPATIBLE"}
    assert ours["b"].reason == "none of its modules is imported"
    assert target.a(1) == 1


def test_a_group_is_active_when_all_that_matters_of_it_is_in_place(world: World, patcher: Make) -> None:
    world.make("target", AB)
    ours = patcher(*two(second="target:missing", optional=True))
    assert not ours.is_active("g")
    ours.arm()
    assert ours.is_active("g")
    assert not ours.is_active("unheard of")


def test_states_go_from_disabled_to_pending_to_active_to_removed(world: World, patcher: Make) -> None:
    ours = patcher(patch("target:a other:a"))
    it = ours["it"]
    assert (str(it.state), it.reason) == ("DISABLED", "not armed in this process")
    ours.arm()
    assert (str(it.state), it.reason) == ("PENDING", "waiting for the import of target or other")
    world.make("target", AB)
    assert (str(it.state), it.reason) == ("ACTIVE", "wrapped")
    ours.disarm()
    assert (str(it.state), it.reason) == ("REMOVED", "removed")
    ours.disarm()
    assert (str(it.state), it.reason) == ("REMOVED", "removed")


def test_a_patch_that_never_applied_says_so_when_removed(patcher: Make) -> None:
    ours = patcher(patch("never_imported:a"))
    ours.arm()
    ours.disarm()
    assert ours["it"].reason == "was PENDING: waiting for the import of never_imported"


def test_calls_are_counted_from_arming_on_also_when_idle(world: World, patcher: Make) -> None:
    target = world.make("target", AB)
    target.a(1)
    ours = patcher(patch("target:a", idle=lambda: True))
    ours.arm()
    for _ in range(5):
        target.a(1)
    assert ours["it"].calls == 5
    assert ours["it"].snapshot().as_dict()["calls"] == 5


@pytest.mark.parametrize(
    "more",
    [{"targets": ()}, {"around": None}, {"instead": lambda call: None}],
    ids=["no target", "none", "both"],
)
def test_a_declaration_that_makes_no_sense_is_refused(more: dict[str, Any]) -> None:
    good = {"name": "it", "group": "g", "targets": (Target("m", "f"),), "around": doing()}
    with pytest.raises(TypeError, match="'it' needs targets"):
        Patch(**{**good, **more})
