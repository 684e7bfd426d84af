"""Optimizer step: which step of the rollout a captured log-prob belongs to."""

from __future__ import annotations

from slime_instrument._capture import current_session
from slime_instrument._patching.declaration import Advice, Call, Patch, Target


def note_step(call: Call) -> Advice | None:
    session = current_session()
    if session is not None:
        session.begin_step(int(call["step_id"]))
    return None


PATCHES = (
    Patch(
        name="optimizer-step",
        group="provenance",
        needs=("dump",),
        targets=(Target("slime.backends.megatron_utils.model", "train_one_step"),),
        relies_on=("rollout_id", "step_id"),
        before=note_step,
        lost="The optimizer step of captured log-probs is lost.",
        idle=lambda: current_session() is None,
        optional=True,
    ),
)
