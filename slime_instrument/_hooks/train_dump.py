"""Dump: instead of one file per rank, one aligned v2 file per rollout.

Where there are no Megatron groups (the FSDP backend of v0.2.0 to v0.2.2 calls the same function) slime's own dump
runs untouched.
"""

from __future__ import annotations

from typing import Any

from slime_instrument import _runtime as runtime
from slime_instrument._capture import current_session
from slime_instrument._dump.topology import megatron_is_up
from slime_instrument._patching.declaration import Advice, Call, Patch, Target


def dump_instead(call: Call) -> Advice | None:
    args = call["args"]
    if getattr(args, "save_debug_train_data", None) is None or not megatron_is_up():
        return None
    return Advice(instead=lambda: write(args, call["rollout_id"], call["rollout_data"]))


def write(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    current = runtime.current()
    if current.due(rollout_id):
        from slime_instrument._dump.pipeline import dump

        session = current_session()
        if session is None:
            current.training_begins(rollout_id)  # not seen here, but counted by the other ranks, which may be waiting
        dump(current, args, rollout_id, rollout_data, session)


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
