"""Dump: instead of one file per rank, one aligned v2 file per rollout.

Where there are no Megatron groups (the FSDP backend of v0.2.0 to v0.2.2 calls the same function) slime's own dump
runs untouched.
"""

from __future__ import annotations

from typing import Any

from slime_instrument import _runtime as runtime
from slime_instrument._capture import current_session
from slime_instrument._dump.contribute import Seen, megatron_is_up
from slime_instrument._patching.declaration import Advice, Call, Patch, Target


def dump_instead(call: Call) -> Advice | None:
    args = call["args"]
    if getattr(args, "save_debug_train_data", None) is None or not megatron_is_up():
        return None
    return Advice(instead=lambda: write(args, call["rollout_id"], call["rollout_data"]))


def write(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    current = runtime.current()
    if current.dumps.due(rollout_id):
        current.dumps.dump(args, rollout_id, rollout_data, _seen(current))


def _seen(current: runtime.Runtime) -> Seen:
    session = current_session()
    if session is None:
        why = "train_actor was not seen: another class brings its own"
        return Seen(route=current.route, positions_from=current.positions_from, why_no_log_probs=why)
    values, steps = (session.collected() if session.wanted else None) or (None, None)
    inactive = [
        f"{r.patch.name} is {r.state}: {r.reason}"
        for r in current.patcher
        if r.patch.group == "capture" and (r.inert or r.bypassed)
    ]
    why = "the loss of this run computes no policy log-probs"
    if inactive and not session.native_capture:
        why = "not captured: " + "; ".join(inactive)
    return Seen(
        failure=session.failure,
        log_probs=values,
        optimizer_steps=steps,
        came_with_rollout=session.keys_at_start,
        captured_by_slime=session.native_capture,
        positions_from=current.positions_from,
        route=current.route,
        why_no_log_probs=why,
    )


PATCHES = (
    Patch(
        name="train-dump",
        group="dump",
        targets=(
            Target("slime.observability.train_data_utils", "save_debug_train_data"),
            Target("slime.backends.megatron_utils.train_dump_utils", "save_debug_train_data"),
            Target("slime.utils.train_dump_utils", "save_debug_train_data"),
        ),
        relies_on=("args", "rollout_id", "rollout_data"),
        before=dump_instead,
        lost="This rollout has no train dump.",
        # Before #2266 slime's own dump writes one file per rank: never under the name of a v2 file, in mid-run.
        hold=True,
    ),
)
