"""First value wins, nothing is kept alive, and everybody sees their own session."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from slime_instrument._hooks.capture import (
    LOCAL_KEY,
    POLICY_LOSSES,
    POSITION_KEY,
    SESSIONS,
    CaptureSession,
    Loaded,
    PolicyLoss,
    current_session,
    policy_loss,
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
    assert session.captured_by_slime


def test_log_probs_that_were_there_before_the_first_step_are_not_a_capture_of_slimes() -> None:
    rollout_data = data()
    session = CaptureSession(0, rollout_data)
    rollout_data["log_probs"] = [torch.zeros(2)] * 2
    session.begin_step(0)
    assert not session.captured_by_slime


def test_a_closed_session_holds_no_tensor() -> None:
    session = CaptureSession(0, data())
    session.capture([0], [torch.ones(2)])
    collected = session.collected()
    assert collected is not None
    kept = weakref.ref(collected[0][0])
    del collected
    assert kept() is not None
    session.close()
    assert kept() is None


# ---------------------------------------------------------------- modes that the caller may be in


MODES: dict[str, Callable[[], Any]] = {
    "default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no grad": torch.no_grad,
    "grad": torch.enable_grad,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kinds", [["float32", "float32"], ["float32", "bfloat16"], ["float64", "float32"]])
def test_captured_values_are_plain_and_bit_identical_whatever_mode_the_loss_runs_in(mode: str, kinds: Any) -> None:
    session = CaptureSession(0, data())
    given = [torch.randn(3).to(getattr(torch, kind)) for kind in kinds]
    expected = [value.clone() for value in given]
    with MODES[mode]():
        if mode == "inference mode":
            given = [value.clone() for value in given]
        session.capture([0, 1], given)
    collected = session.collected()
    assert collected is not None
    for value, wanted in zip(collected[0], expected, strict=True):
        assert value is not None
        assert (value.dtype, value.device) == (wanted.dtype, wanted.device)
        assert torch.equal(value, wanted)
        assert not value.is_inference()
        value.add_(1)  # a tensor of inference mode could not be worked on out here


def test_capturing_under_another_default_dtype_changes_nothing() -> None:
    session = CaptureSession(0, data())
    torch.set_default_dtype(torch.float64)
    try:
        session.capture([0, 1], [torch.ones(2, dtype=torch.float32), torch.zeros(1, dtype=torch.float32)])
    finally:
        torch.set_default_dtype(torch.float32)
    collected = session.collected()
    assert collected is not None
    assert [value.dtype for value in collected[0] if value is not None] == [torch.float32] * 2


def test_values_of_odd_shapes_are_kept_as_they_are() -> None:
    session = CaptureSession(0, data())
    given = [torch.randn(2, 3), torch.tensor(1.5)]
    session.capture([0, 1], given)
    collected = session.collected()
    assert collected is not None
    assert all(torch.equal(value, wanted) for value, wanted in zip(collected[0], given, strict=True))  # type: ignore[arg-type]


# ---------------------------------------------------------------- whose session, whose loss


def test_a_session_is_over_at_the_end_of_its_block_and_nested_ones_come_back_in_order() -> None:
    outer, inner = CaptureSession(0, data()), CaptureSession(1, data())
    with SESSIONS.opened(outer):
        with contextlib.suppress(KeyError), SESSIONS.opened(inner):
            assert current_session() is inner
            raise KeyError
        assert current_session() is outer
    assert current_session() is None


def test_threads_see_their_own_session_and_loss_only() -> None:
    seen: dict[str, Any] = {}
    barrier = threading.Barrier(2)

    def work(name: str) -> None:
        session = CaptureSession(0, data())
        loss = PolicyLoss(session, {"of": name})
        barrier.wait(10)
        with SESSIONS.opened(session), POLICY_LOSSES.opened(loss):
            barrier.wait(10)
            seen[name] = (current_session() is session, policy_loss() is loss)
            barrier.wait(10)

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"a": (True, True), "b": (True, True)}


def elsewhere(how: str, call: Callable[[], Any]) -> Any:
    """Run ``call`` where the caller's context variables are not seen."""
    if how == "fresh context":
        return contextvars.Context().run(call)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


@pytest.mark.parametrize("how", ["fresh context", "thread pool"])
def test_code_in_another_context_sees_the_only_session_and_loss_that_are_open(how: str) -> None:
    session = CaptureSession(0, data())
    loss = PolicyLoss(session, {})
    assert elsewhere(how, current_session) is None
    with SESSIONS.opened(session), POLICY_LOSSES.opened(loss):
        assert elsewhere(how, current_session) is session
        assert elsewhere(how, policy_loss) is loss
    assert elsewhere(how, current_session) is None


@pytest.mark.parametrize("how", ["fresh context", "thread pool"])
def test_where_two_sessions_are_open_code_in_another_context_is_given_neither(how: str) -> None:
    with SESSIONS.opened(CaptureSession(0, data())), SESSIONS.opened(CaptureSession(1, data())):
        assert elsewhere(how, current_session) is None
        assert current_session() is not None


def test_the_only_loss_that_is_open_is_not_lent_to_another_session() -> None:
    mine, theirs = CaptureSession(0, data()), CaptureSession(1, data())

    def look() -> Any:
        with SESSIONS.opened(mine):
            return policy_loss()

    with SESSIONS.opened(theirs), POLICY_LOSSES.opened(PolicyLoss(theirs, {})):
        assert elsewhere("thread pool", look) is None
        assert policy_loss() is not None


def test_a_context_that_was_copied_inside_a_session_does_not_keep_it() -> None:
    session = CaptureSession(0, data())
    kept = weakref.ref(session)
    with SESSIONS.opened(session):
        copied = contextvars.copy_context()
        assert copied.run(current_session) is session
    del session
    assert copied.run(current_session) is None
    assert kept() is None


# ---------------------------------------------------------------- keys of ours in slime's dict


def test_a_failure_takes_our_keys_out_and_leaves_slimes() -> None:
    for loaded, left in ((Loaded("partition", added=True), set()), (Loaded("partition"), {POSITION_KEY})):
        rollout_data = data()
        session = CaptureSession(0, rollout_data, loaded)
        session.number_samples()
        session.fail("first")
        session.fail("second")
        assert session.failure == "first"
        assert set(rollout_data) == {"response_lengths"} | left


def test_a_nested_session_leaves_the_key_to_the_one_that_put_it_there() -> None:
    rollout_data = {"response_lengths": [1, 1]}
    outer, inner = CaptureSession(0, rollout_data), CaptureSession(0, rollout_data)
    outer.number_samples()
    inner.number_samples()
    inner.close()
    assert rollout_data[LOCAL_KEY] == [0, 1]
    outer.close()
    assert LOCAL_KEY not in rollout_data
