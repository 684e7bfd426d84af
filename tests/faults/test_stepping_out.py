"""What one rank does for the others when it fails: the single pieces behind the fault matrix."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed import distributed_c10d

from slime_instrument._dump import dumper as dumper_module
from slime_instrument._dump.agree import Agreement, CallId, NotAgreed, Presence, Seen, Topology
from slime_instrument._dump.dumper import Dumper
from slime_instrument._errors import DumpError
from slime_instrument._patching.failures import FailurePolicy
from slime_instrument._patching.patch import Call, Patch, Target
from slime_instrument._patching.patcher import Patcher
from slime_instrument._settings import Settings

RANK = 3
TOPOLOGY = Topology(RANK, 1, 0, 1, 2, 1, 2, 1, True, (1, RANK))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of a job in which this process is rank 3."""
    made = HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: made)
    monkeypatch.setattr(dist, "get_rank", lambda: RANK)
    monkeypatch.setattr(dumper_module, "read_topology", lambda: TOPOLOGY)
    return made


def dumper(earlier: Dumper | None = None) -> Dumper:
    return Dumper(Settings(), FailurePolicy(lambda: True).report, earlier=earlier)


def presence(store: Any) -> Presence:
    found = Presence()
    found.store = store
    return found


def test_a_rank_that_steps_out_is_not_waited_for_and_the_others_know_why(store: Any) -> None:
    ours = dumper()
    ours.begin(5)
    assert presence(store).absent([RANK]) is None
    ours.step_out("no luck")
    assert presence(store).absent([RANK]) == "rank 3 dumps no more (no luck)"


def test_a_rank_that_never_trained_steps_out_in_silence() -> None:
    dumper().step_out("no luck")


def test_a_rank_that_gives_up_tells_the_others_not_to_wait(store: Any) -> None:
    ours = dumper()
    ours.begin(5)
    ours.give_up(5, "train-dump failed: ValueError: no luck")
    topology = replace(TOPOLOGY, rank=1, context_rank=0)
    other = Agreement(store, CallId(5, 0, 0), topology, 60.0, {}, lambda _text: None)
    other.arrive("{rollout_id}.pt")
    with pytest.raises(NotAgreed, match="rank 3: train-dump failed: ValueError: no luck"):
        other.wait_for_all()


def test_a_rollout_that_is_trained_again_after_re_arming_does_not_meet_its_old_decision(store: Any) -> None:
    first = dumper()
    first.begin(5)
    first.give_up(5, "no luck")
    again = dumper(first)
    again.begin(5)
    fresh = Agreement(store, CallId(5, 1, 0), TOPOLOGY, 0.05, {}, lambda _text: None)
    with pytest.raises(NotAgreed, match="did not come within"):
        fresh.wait_for_go()


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


def around(before: Callable[[Call], None]) -> Patch:
    def hook(call: Call) -> Iterator[None]:
        before(call)
        yield

    return Patch("around", (Target("held_target", "work"),), "group", ("thing",), around=hook)


def instead(hook: Callable[[Call], Any]) -> Patch:
    return Patch("instead", (Target("held_target", "work"),), "group", ("thing",), instead=hook)


def no_luck(_call: Call) -> Any:
    raise ValueError("no")


@pytest.mark.parametrize("taken_over", [True, False])
def test_a_target_that_is_taken_over_is_not_called_when_the_hook_fails(target: Make, taken_over: bool) -> None:
    module = target(instead(no_luck) if taken_over else around(no_luck), False)
    assert module.work(1) == (None if taken_over else 1)
    assert module.ran == ([] if taken_over else [1])


def test_a_target_that_is_taken_over_is_called_where_the_hook_does_not_want_the_call(target: Make) -> None:
    module = target(instead(lambda _call: NotImplemented), False)
    assert module.work(1) == 1


@pytest.mark.parametrize("form", [around, instead])
@pytest.mark.parametrize("kind", [ValueError, DumpError])
@pytest.mark.parametrize("strict", [True, False])
def test_what_a_failed_call_held_is_released_without_a_garbage_collection(
    target: Make, kind: type[Exception], strict: bool, form: Callable[[Any], Patch]
) -> None:
    """An exception that a frame of its own traceback holds would keep every local variable of the call alive."""

    class Held:
        pass

    def fail(_call: Any) -> Any:
        held = Held()
        alive.append(weakref.ref(held))
        raise kind("no")

    alive: list[Any] = []
    module = target(form(fail), strict)
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


def test_a_rank_that_is_not_armed_is_logged_once_and_not_for_every_rollout(
    store: Any, caplog: pytest.LogCaptureFixture
) -> None:
    policy = FailurePolicy(lambda: False)
    ours = Dumper(Settings(), policy.report)
    for rollout_id in range(3):
        ours.begin(rollout_id)
        with pytest.raises(NotAgreed) as caught:
            ours.dump(SimpleNamespace(save_debug_train_data="{rollout_id}.pt"), rollout_id, {}, Seen())
        policy.report("train-dump", caught.value, "This rollout has no train dump.")
    (line,) = [record.getMessage() for record in caplog.records if "train-dump failed" in record.getMessage()]
    assert "rank(s) [1] train without instrumentation" in line
