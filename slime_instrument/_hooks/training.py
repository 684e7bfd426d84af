"""From the trainer's call to the log-probs of each micro-batch.

A session is open for the length of ``train_actor``. Inside it, each micro-batch carries the positions of its samples;
the policy loss is marked while it runs; and the log-probs that appear in it are kept under those positions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from slime_instrument._dump.agree import megatron_is_up
from slime_instrument._hooks.capture import (
    LOCAL_KEY,
    NATIVE_CAPTURE,
    POLICY_LOSSES,
    POSITION_KEY,
    SESSIONS,
    CaptureSession,
    PolicyLoss,
    Process,
    arguments,
    capturing,
    current_session,
    dict_with,
    dump_is_asked_for,
    one_for_each_sample,
    policy_loss,
)
from slime_instrument._patching.patch import Already, Call, around
from slime_instrument._switch import package

_MEGATRON = f"{package()}.backends.megatron_utils"
_NATIVE = Already(NATIVE_CAPTURE, "slime captures these log-probs itself since #2266")
_LOST_LOG_PROBS = "The log-probs of this micro-batch are lost, and with them this rollout's train dump."


@around(
    "train-actor",
    f"{_MEGATRON}.actor:MegatronTrainRayActor.train_actor",
    group="dump",
    takes=("self", "rollout_id", "rollout_data"),
    on_failure="This rollout has no train dump.",
)
def train_actor(call: Call) -> Iterator[None]:
    process: Process = call.process
    trainer, rollout_id, rollout_data = call["self"], call["rollout_id"], call["rollout_data"]
    if not dump_is_asked_for(getattr(trainer, "args", None)) or not megatron_is_up():
        return
    failed_to_load = process.take_failures().get("data-loader")
    process.patcher.finalize()
    if not process.dumper.due(rollout_id) or not process.patcher.is_active("dump"):
        return
    process.dumper.begin(rollout_id, trainer.args, process.route)
    session = CaptureSession(rollout_id, rollout_data, process.loaded)
    session.weight_version = _weight_version(trainer)
    if failed_to_load is not None:
        session.fail(failed_to_load)
    # slime averages every list that it does not know; without the patch that hides ours from it, none is added.
    elif session.key == LOCAL_KEY and process.patcher.is_active("rollout-metrics"):
        session.number_samples()
    with SESSIONS.opened(session):
        try:
            yield
        except GeneratorExit:  # the target raised
            process.dumper.ended(rollout_id, "its train_actor raised before the dump")
            raise
        else:
            process.dumper.ended(rollout_id)
        finally:
            session.close()
            process.rollout_ended(session)
            drain_native_capture()


def _weight_version(trainer: Any) -> int | None:
    """How often the weights were sent to the rollout engines, where the trainer counts it."""
    version = getattr(getattr(trainer, "weight_updater", None), "weight_version", None)
    return version if type(version) is int else None


def drain_native_capture() -> None:
    """slime since #2266 keeps captured tensors in a module global, for good when training raises before it drains."""
    loss: Any = sys.modules.get(f"{_MEGATRON}.loss")
    drain = getattr(loss, "drain_captured_log_probs", None)
    if drain is not None:
        drain()


@around(
    "rollout-metrics",
    f"{package()}.observability.train_metric_utils:log_rollout_data",
    f"{_MEGATRON}.data:log_rollout_data",
    takes=("rollout_data",),
    on_failure="A key of ours may show up in slime's metrics.",
)
def hide_positions(call: Call) -> Iterator[None]:
    """No key of ours ever shows up in what slime logs.

    ``log_rollout_data`` averages every list that it does not know. It also adds keys of its own to the dict, which
    belong in the dump; so it gets the very same dict, with our keys out of it for the length of the call. Since #2266
    slime itself logs a meaningless ``rollout/partition``, which disappears the same way.
    """
    if not dump_is_asked_for(arguments(call)):
        return
    session = current_session()
    if session is not None:
        session.begin_training()  # slime logs right before it trains
    rollout_data = call["rollout_data"]
    hidden = {key: rollout_data.pop(key) for key in (POSITION_KEY, LOCAL_KEY) if key in rollout_data}
    try:
        yield
    finally:
        rollout_data.update(hidden)


@around(
    "optimizer-step",
    f"{_MEGATRON}.model:train_one_step",
    needs=("dump",),
    takes=("step_id",),
    optional=True,
    on_failure="The optimizer step of captured log-probs, its loss and its gradient norm are lost.",
    idle=lambda: current_session() is None,
)
def note_step(call: Call) -> Iterator[None]:
    session = current_session()
    if session is not None:
        session.begin_step(int(call["step_id"]))
    yield
    result = call.result
    if session is not None and isinstance(result, tuple) and len(result) == 2:
        session.end_step(*result)


@around(
    "micro-batches",
    f"{_MEGATRON}.data:DataIterator.get_next",
    group="capture",
    needs=("dump",),
    takes=("keys",),
    on_failure=_LOST_LOG_PROBS,
    idle=lambda: capturing() is None,
    unless=_NATIVE,
)
def ask_for_positions(call: Call) -> Iterator[None]:
    """Each sample's position travels inside the batch.

    ``train_one_step`` asks for a fixed list of keys. Pipeline schedules run the forward of the next micro-batch before
    the loss of this one, so what identifies a sample must be in the batch itself; no global could say which is current.
    """
    session = capturing()
    if session is None or session.key in call["keys"]:
        return
    # A key of another length would be an error in slime, where it cuts each list by the samples of the micro-batch.
    if one_for_each_sample(session.key, getattr(call.get("self"), "rollout_data", session.rollout_data)):
        call["keys"] = [*call["keys"], session.key]
    yield


@around(
    "policy-loss",
    f"{_MEGATRON}.loss:policy_loss_function",
    group="capture",
    needs=("dump",),
    takes=("batch",),
    on_failure=_LOST_LOG_PROBS,
    idle=lambda: capturing() is None,
    unless=_NATIVE,
)
def mark_policy_loss(call: Call) -> Iterator[None]:
    """Log-probs are taken only inside the policy loss: ref, teacher and old-actor passes compute them too."""
    session = capturing()
    if session is None:
        return
    session.losses += 1
    with POLICY_LOSSES.opened(PolicyLoss(session, call["batch"])):
        yield


@around(
    "log-probs",
    f"{_MEGATRON}.loss:get_log_probs_and_entropy",
    group="capture",
    needs=("dump",),
    on_failure=_LOST_LOG_PROBS,
    idle=lambda: policy_loss() is None,
    unless=_NATIVE,
)
def take_log_probs(call: Call) -> Iterator[None]:
    """The per-sample list never leaves ``policy_loss_function``, so it is taken here, where it appears. A recomputed
    loss (activation checkpointing) comes a second time; the first value is kept."""
    loss = policy_loss()
    if loss is None or loss.session.failure is not None:
        return
    positions = loss.batch.get(loss.session.key)
    if positions is None:
        return
    yield
    loss.session.capture(positions, per_sample(call.result))


def per_sample(result: Any) -> Sequence[Any]:
    """The list of per-sample log-probs: the result is a dict up to v0.2.2, ``(tensor, dict)`` since v0.2.3."""
    found = dict_with("log_probs", result)
    if found is None:
        raise TypeError(f"expected a dict with log_probs, alone or in a tuple; found {type(result).__name__}")
    log_probs: Sequence[Any] = found["log_probs"]
    return log_probs
