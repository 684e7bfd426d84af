"""Trainer: one capture session per ``train_actor`` call, gone at its end whatever happened."""

from __future__ import annotations

import sys
from typing import Any

from slime_instrument import _runtime as runtime
from slime_instrument._capture import LOCAL_KEY, CaptureSession, enter, leave
from slime_instrument._dump.contribute import megatron_is_up
from slime_instrument._patching.declaration import Advice, Call, Patch, Target


def open_session(call: Call) -> Advice | None:
    args, rollout_id, rollout_data = call["self"].args, call["rollout_id"], call["rollout_data"]
    if getattr(args, "save_debug_train_data", None) is None or not megatron_is_up():
        return None
    current = runtime.current()
    failure = current.take_failure()
    current.patcher.settle()
    if not current.dumps.due(rollout_id) or not current.patcher.stands("dump"):
        return None
    current.dumps.begin(rollout_id)
    session = CaptureSession(rollout_id, rollout_data)
    session.failure = failure
    # slime averages every list that it does not know; without the patch that hides ours from it, none is added.
    if session.key == LOCAL_KEY and current.patcher.stands("metrics"):
        rollout_data[LOCAL_KEY] = list(range(len(rollout_data["response_lengths"])))
    handle = enter(session)

    def close() -> None:
        try:
            leave(handle)
        finally:
            rollout_data.pop(LOCAL_KEY, None)
            drain_native_capture()

    return Advice(cleanup=close)


def drain_native_capture() -> None:
    """slime since #2266 keeps captured tensors in a module global, for good when training raises before it drains."""
    loss: Any = sys.modules.get("slime.backends.megatron_utils.loss")
    drain = getattr(loss, "drain_captured_log_probs", None)
    if drain is not None:
        drain()


PATCHES = (
    Patch(
        name="train-actor",
        group="dump",
        targets=(Target("slime.backends.megatron_utils.actor", "MegatronTrainRayActor.train_actor"),),
        relies_on=("self", "rollout_id", "rollout_data"),
        before=open_session,
        lost="This rollout has no train dump.",
    ),
)
