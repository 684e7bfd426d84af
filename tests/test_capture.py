"""First value wins, nothing is kept alive, and everybody sees their own session."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from slime_instrument._capture import (
    LOCAL_KEY,
    POSITION_KEY,
    CaptureSession,
    current_session,
    enter,
    enter_policy_loss,
    leave,
    leave_policy_loss,
    policy_batch,
)


def data(count: int = 2, **more: Any) -> dict[str, Any]:
    return {"response_lengths": [2] * count, "partition": list(range(count)), **more}


class _Tripled(torch.autograd.Function):
    """Times 3; ``alive`` is a weak reference to something that lives as long as the autograd graph does."""

    alive: weakref.ref[Any] | None = None

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.held = CaptureSession(0, data())
        _Tripled.alive = weakref.ref(ctx.held)
        return value * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 3


def values(session: CaptureSession) -> list[list[float] | None]:
    collected = session.collected()
    assert collected is not None
    return [None if value is None else value.tolist() for value in collected[0]]


def test_values_come_back_in_local_sample_order() -> None:
    session = CaptureSession(0, data(3, partition=[7, 2, 9]))
    session.capture([9, 7], [torch.tensor([9.0]), torch.tensor([7.0, 7.5])])
    session.capture([2], [torch.tensor([])])
    assert values(session) == [[7.0, 7.5], [], [9.0]]


def test_the_first_value_wins_when_the_loss_is_computed_again() -> None:
    session = CaptureSession(0, data())
    session.begin_step(0)
    session.capture([0], [torch.tensor([1.0])])
    session.capture([0], [torch.tensor([2.0])])  # recompute
    session.begin_step(1)
    session.capture([0, 1], [torch.tensor([3.0]), torch.tensor([4.0])])  # one known, one new
    assert values(session) == [[1.0], [4.0]]
    collected = session.collected()
    assert collected is not None
    assert collected[1] == [0, 1]


def test_a_sample_that_the_loss_never_saw_has_none() -> None:
    session = CaptureSession(0, data())
    session.capture([1], [torch.tensor([1.0])])
    assert values(session) == [None, [1.0]]


def test_nothing_captured_is_none_and_not_a_list_of_nones() -> None:
    session = CaptureSession(0, data())
    session.capture([], [])
    assert session.collected() is None


def test_positions_and_log_probs_of_different_number_are_an_error_and_nothing_is_kept() -> None:
    session = CaptureSession(0, data())
    with pytest.raises(ValueError, match="2 positions for 1 log-prob tensors"):
        session.capture([0, 1], [torch.zeros(2)])
    assert session.collected() is None


@pytest.mark.parametrize("kept", [0, 1])
def test_values_are_copies_of_what_the_next_micro_batch_overwrites(kept: int) -> None:
    buffer = torch.tensor([1.0, 2.0, 3.0])
    session = CaptureSession(0, data())
    session.capture([0, 1][: kept + 1], list(buffer.split([1, 2]))[: kept + 1])
    buffer.fill_(0.0)
    assert values(session)[0] == [1.0]


def test_no_autograd_graph_is_kept_and_training_still_gets_its_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    log_probs, graph = _Tripled.apply(weight), _Tripled.alive
    assert graph is not None
    session = CaptureSession(0, data())
    session.capture([0, 1], list(log_probs.split(1)))
    log_probs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]
    collected = session.collected()
    assert collected is not None
    assert all(value is not None and not value.requires_grad and value.grad_fn is None for value in collected[0])
    assert graph() is not None
    del log_probs
    gc.collect()
    assert graph() is None


def test_values_captured_in_inference_mode_and_bf16_keep_their_dtype() -> None:
    session = CaptureSession(0, data())
    with torch.inference_mode():
        session.capture([0, 1], [torch.ones(2, dtype=torch.bfloat16), torch.zeros(0, dtype=torch.bfloat16)])
    collected = session.collected()
    assert collected is not None
    assert [value.dtype for value in collected[0] if value is not None] == [torch.bfloat16] * 2


@pytest.mark.parametrize(
    ("partition", "key"),
    [
        ([0, 1], POSITION_KEY),
        ([41, 7], POSITION_KEY),
        ([0, 0], LOCAL_KEY),
        ([0], LOCAL_KEY),
        ([0, 1, 2], LOCAL_KEY),
        (None, LOCAL_KEY),
    ],
)
def test_positions_that_do_not_tell_samples_apart_are_not_captured_by(partition: Any, key: str) -> None:
    assert CaptureSession(0, data(partition=partition)).key == key


def test_samples_with_the_same_position_keep_their_own_values() -> None:
    rollout_data = data(partition=[5, 5])
    session = CaptureSession(0, rollout_data)
    rollout_data[LOCAL_KEY] = [0, 1]
    session.capture([0], [torch.tensor([1.0])])
    session.capture([1], [torch.tensor([2.0])])
    assert values(session) == [[1.0], [2.0]]


def test_nothing_is_wanted_once_slime_has_computed_the_log_probs_itself() -> None:
    rollout_data = data()
    session = CaptureSession(0, rollout_data)
    assert session.wanted
    session.begin_step(0)
    rollout_data["log_probs"] = [torch.zeros(2)] * 2
    assert not session.wanted
    assert session.native_capture


def test_log_probs_that_were_there_before_the_first_step_are_not_a_capture_of_slimes() -> None:
    rollout_data = data()
    session = CaptureSession(0, rollout_data)
    rollout_data["log_probs"] = [torch.zeros(2)] * 2
    session.begin_step(0)
    assert not session.native_capture


def test_a_closed_session_holds_no_tensor() -> None:
    session = CaptureSession(0, data())
    session.capture([0], [torch.ones(2)])
    collected = session.collected()
    assert collected is not None
    kept = weakref.ref(collected[0][0])
    del collected
    handle = enter(session)
    assert kept() is not None
    leave(handle)
    assert kept() is None
    assert current_session() is None


def test_leaving_closes_its_own_session_also_when_an_inner_one_was_left_open() -> None:
    outer, inner = CaptureSession(0, data()), CaptureSession(1, data())
    outer.capture([0], [torch.ones(2)])
    handle = enter(outer)
    enter(inner)
    leave(handle)
    assert outer.collected() is None
    assert current_session() is None


def test_nested_sessions_come_back_in_order() -> None:
    outer, inner = CaptureSession(0, data()), CaptureSession(1, data())
    outer_handle = enter(outer)
    inner_handle = enter(inner)
    assert current_session() is inner
    leave(inner_handle)
    assert current_session() is outer
    leave(outer_handle)
    assert current_session() is None


def test_threads_see_their_own_session_and_batch_only() -> None:
    seen: dict[str, Any] = {}
    barrier = threading.Barrier(2)

    def work(name: str) -> None:
        assert current_session() is None
        assert policy_batch() is None
        session = CaptureSession(0, data())
        handle = enter(session)
        batch = enter_policy_loss({"of": name})
        barrier.wait(10)
        seen[name] = (current_session() is session, policy_batch())
        barrier.wait(10)
        leave_policy_loss(batch)
        leave(handle)

    outer = enter(CaptureSession(0, data()))
    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    leave(outer)
    assert seen == {"a": (True, {"of": "a"}), "b": (True, {"of": "b"})}
