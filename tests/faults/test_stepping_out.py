"""What one rank does for the others when it fails: the single pieces behind the fault matrix."""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from slime_instrument import _runtime as runtime
from slime_instrument._capture import (
    CaptureSession,
    current_session,
    enter,
    enter_policy_loss,
    leave,
    policy_batch,
)
from slime_instrument._dump.agreement import Agreement, NotAgreed, announce, not_armed
from slime_instrument._errors import DumpError
from slime_instrument._patching.declaration import Advice, Patch, Target
from slime_instrument._patching.failures import FailurePolicy
from slime_instrument._patching.patcher import Patcher
from slime_instrument._state import Runtime

RANK = 3


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """A runtime that has announced itself as rank 3."""
    made = Runtime("a test")
    made._announced_in, made._announced_rank = HashStore(), RANK
    announce(made._announced_in, RANK)
    monkeypatch.setattr(runtime, "_current", made)
    made.patcher.arm()
    yield made
    made.patcher.disarm()


@pytest.mark.parametrize(
    ("patch", "for_good", "present"),
    [("train-dump", True, False), ("micro-batches", True, False), ("train-dump", False, True)],
)
def test_a_rank_that_failed_for_good_is_not_waited_for(
    armed: Runtime, patch: str, for_good: bool, present: bool
) -> None:
    armed._failed(patch, ValueError("no"), for_good)
    assert not_armed(armed._announced_in, [RANK]) == ([] if present else [RANK])


def test_a_patch_that_costs_no_dump_does_not_take_the_rank_out(armed: Runtime) -> None:
    armed._failed("optimizer-step", ValueError("no"), True)
    assert not_armed(armed._announced_in, [RANK]) == []


def test_a_rank_that_is_unarmed_in_mid_run_is_not_waited_for(armed: Runtime) -> None:
    runtime.uninstrument()
    assert not_armed(armed._announced_in, [RANK]) == [RANK]


@pytest.mark.parametrize(
    ("patch", "concerns_the_next"), [("data-loader", True), ("train-actor", False), ("train-dump", False)]
)
def test_only_a_failure_while_loading_concerns_the_rollout_that_trains_next(
    armed: Runtime, patch: str, concerns_the_next: bool
) -> None:
    assert current_session() is None
    armed._failed(patch, ValueError("no"), False)
    assert (armed.take_failure() is not None) is concerns_the_next


def test_a_dump_that_fails_before_agreeing_tells_the_others_not_to_wait(armed: Runtime) -> None:
    session = CaptureSession(5, {"response_lengths": []})
    armed.training_begins(5)
    handle = enter(session)
    try:
        armed._failed("train-dump", ValueError("no luck"), False)
    finally:
        leave(handle)
    other = Agreement(armed._announced_in, "5/0", 1, [1, RANK], timeout_s=60.0)
    with pytest.raises(NotAgreed, match="rank 3: train-dump failed: ValueError: no luck"):
        other.ready("1,1,1")


def test_a_rollout_that_is_trained_again_after_re_arming_does_not_meet_its_old_decision(armed: Runtime) -> None:
    armed.training_begins(5)
    first = armed.dump_key(5)
    again = Runtime("armed again", armed)
    again.training_begins(5)
    assert (first, again.dump_key(5), again.dump_key(6)) == ("5/0", "5/1", "6/0")


def test_a_spoilt_dump_is_refused_with_the_senders_reason() -> None:
    store = HashStore()
    writer, sender = (Agreement(store, "0/0", rank, [0, 1], 5.0) for rank in (0, 1))
    writer.refuse_spoilt()
    sender.spoil("MemoryError: no more")
    with pytest.raises(NotAgreed, match="rank 1: MemoryError: no more"):
        writer.refuse_spoilt()


def test_a_mark_whose_end_failed_is_gone_when_the_session_ends() -> None:
    handle = enter(CaptureSession(0, {"response_lengths": []}))
    enter_policy_loss({"tokens": []})  # and never left
    leave(handle)
    assert policy_batch() is None


Make = Callable[[Patch, bool], Any]


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Patches ``held_target.work`` and returns the module; its ``ran`` lists the calls of the original."""
    module: Any = ModuleType("held_target")
    module.ran = []
    exec("def work(thing):\n    ran.append(thing)\n    return thing\n", vars(module))
    monkeypatch.setitem(sys.modules, "held_target", module)
    made = []

    def make(patch: Patch, strict: bool) -> Any:
        patcher = Patcher([patch], FailurePolicy(strict=lambda: strict))
        patcher.arm()
        made.append(patcher)
        return module

    yield make
    for patcher in made:
        patcher.disarm()


def declared(before: Callable[[Any], Advice | None], *, hold: bool) -> Patch:
    return Patch("held", (Target("held_target", "work"),), "group", ("thing",), before, hold=hold)


@pytest.mark.parametrize("hold", [True, False])
def test_a_target_that_is_held_back_is_not_called_when_the_patch_cannot_say_what_to_do(
    target: Make, hold: bool
) -> None:
    def fail(_call: Any) -> Advice | None:
        raise ValueError("no")

    module = target(declared(fail, hold=hold), False)
    assert module.work(1) == (None if hold else 1)
    assert module.ran == ([] if hold else [1])


def test_a_held_target_is_called_where_the_patch_leaves_the_call_alone(target: Make) -> None:
    module = target(declared(lambda _call: None, hold=True), False)
    assert module.work(1) == 1


def test_where_a_call_left_alone_would_do_harm_a_second_way_is_asked(target: Make) -> None:
    def fail(_call: Any) -> Advice | None:
        raise ValueError("no")

    rescued = dataclasses.replace(declared(fail, hold=False), rescue=lambda call: Advice(call.replaced("thing", 2)))
    assert target(rescued, False).work(1) == 2


@pytest.mark.parametrize("kind", [ValueError, DumpError])
@pytest.mark.parametrize("strict", [True, False])
def test_what_a_failed_call_held_is_released_without_a_garbage_collection(
    target: Make, kind: type[Exception], strict: bool
) -> None:
    """An exception that a frame of its own traceback holds would keep every local variable of the call alive."""

    class Held:
        pass

    def fail(_call: Any) -> Advice | None:
        held = Held()
        alive.append(weakref.ref(held))
        raise kind("no")

    alive: list[Any] = []
    module = target(declared(fail, hold=False), strict)
    gc.disable()
    try:
        if strict:
            with pytest.raises(DumpError):
                module.work(1)
        else:
            module.work(1)
        assert [reference() for reference in alive] == [None]
    finally:
        gc.enable()
