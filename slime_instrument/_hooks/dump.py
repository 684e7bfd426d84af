"""Dump: instead of one file per rank, one aligned v2 file per rollout.

Where there are no Megatron groups (the FSDP backend of v0.2.0 to v0.2.2 calls the same function) slime's own dump runs
untouched. Everywhere else it never does: before #2266 it writes one file per rank, and those would come under the name
of a v2 file in mid-run.
"""

from __future__ import annotations

import operator
from typing import Any

from slime_instrument._dump.agree import Seen, megatron_is_up
from slime_instrument._errors import describe
from slime_instrument._hooks.capture import (
    POSITION_KEY,
    CaptureSession,
    Loaded,
    Process,
    arguments,
    current_session,
    dump_is_asked_for,
    one_for_each_sample,
)
from slime_instrument._patching.patch import Call, State, instead
from slime_instrument._switch import package


@instead(
    "train-dump",
    f"{package()}.observability.train_data_utils:save_debug_train_data",
    f"{package()}.backends.megatron_utils.train_dump_utils:save_debug_train_data",
    f"{package()}.utils.train_dump_utils:save_debug_train_data",
    group="dump",
    takes=("rollout_id", "rollout_data"),
    on_failure="This rollout has no train dump.",
)
def save_debug_train_data(call: Call) -> Any:
    args, rollout_id, rollout_data = arguments(call), _plain_id(call["rollout_id"]), call["rollout_data"]
    if not dump_is_asked_for(args) or not megatron_is_up():
        return NotImplemented
    process: Process = call.process
    if not process.dumper.due(rollout_id):
        process.take_failures()
        return None
    session = current_session()
    if session is not None and not _is_of(session, rollout_id, rollout_data):
        session = None  # a trainer with a train_actor of its own
    try:
        if session is None:
            seen = _seen_without_session(process, args, rollout_id, rollout_data)
        else:
            seen = _seen(process, args, session, rollout_data)
        process.dumper.dump(args, rollout_id, rollout_data, seen)
    except BaseException as error:
        process.dumper.give_up(rollout_id, describe(error))
        raise
    return None


def _is_of(session: CaptureSession, rollout_id: Any, rollout_data: dict[str, Any]) -> bool:
    """Whether the session's rollout is dumped; the user's code may number its dumps by something else."""
    tokens = rollout_data.get("tokens")
    same_samples = tokens is not None and tokens is session.rollout_data.get("tokens")
    return same_samples or str(_plain_id(session.rollout_id)) == str(rollout_id)


def _plain_id(rollout_id: Any) -> Any:
    """A Python int of whatever counts as a whole number, so that the file loads safely; else as it is."""
    try:
        return operator.index(rollout_id)
    except TypeError:
        return rollout_id


def _seen(process: Process, args: Any, session: CaptureSession, dumped: dict[str, Any]) -> Seen:
    """What the session saw of its rollout."""
    fits = session.key not in dumped or one_for_each_sample(session.key, dumped)
    wanted = session.wanted and session.failure is None and fits
    captured = session.collected(dumped.get(session.key)) if wanted else None
    log_probs, steps = (None, None) if captured is None else captured
    return Seen(
        failure=session.failure,
        log_probs=log_probs,
        optimizer_steps=steps,
        came_with_rollout=session.came_with_rollout,
        captured_by_slime=session.captured_by_slime,
        positions_from=_positions_from(session.loaded, session.rollout_data),
        route=process.route,
        why_no_log_probs=_why_nothing_was_captured(process, args, session),
        weight_version=session.weight_version,
        step_results=tuple(session.step_results),
    )


def _seen_without_session(process: Process, args: Any, rollout_id: Any, rollout_data: dict[str, Any]) -> Seen:
    failures = process.take_failures()
    if "train-actor" in failures:
        # It failed before it could; the other ranks count this training of the rollout.
        process.dumper.begin(rollout_id, args, process.route)
    return Seen(
        failure=next(iter(failures.values()), None),
        positions_from=_positions_from(process.loaded, rollout_data),
        route=process.route,
        why_no_log_probs=(
            "not captured: the dump was not called within slime's train_actor; either it came later, or this trainer "
            "has a train_actor of its own"
        ),
    )


def _positions_from(loaded: Loaded, rollout_data: dict[str, Any]) -> str:
    if POSITION_KEY not in rollout_data:
        return "unknown"
    # What no load of ours put there is slime's own.
    return "partition" if loaded.positions_from == "unknown" else loaded.positions_from


def _why_nothing_was_captured(process: Process, args: Any, session: CaptureSession) -> str:
    if session.key in session.rollout_data and not one_for_each_sample(session.key, session.rollout_data):
        return f"not captured: {session.key!r} does not have one entry for each sample; did a hook drop or add samples?"
    placements = [each for each in process.patcher if each.patch.group == "capture"]
    inactive = [each for each in placements if each.inert or each.bypassed]
    if inactive and not session.captured_by_slime:
        return "not captured: " + "; ".join(f"{each.patch.name} is {each.state}: {each.reason}" for each in inactive)
    active = any(each.state is State.ACTIVE and each.patch.name == "policy-loss" for each in placements)
    if active and not session.losses and getattr(args, "loss_type", None) == "policy_loss":
        return (
            "not captured: policy_loss_function was not called through its hook; either the original is called past it "
            "(by compiled code, or a partial or closure made before arming), or two rollouts train at the same time"
        )
    return "the loss of this run computes no policy log-probs"
