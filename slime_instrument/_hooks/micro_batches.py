"""Micro-batch iterator: each sample's position travels inside the batch.

``train_one_step`` asks for a fixed list of keys. Pipeline schedules run the forward of the next micro-batch before
the loss of this one, so what identifies a sample must be in the batch itself; no global could say which is current.
"""

from __future__ import annotations

from slime_instrument._capture import capturing
from slime_instrument._patching.declaration import Advice, Call, Patch, Target


def ask_for_positions(call: Call) -> Advice | None:
    session = capturing()
    if session is None or session.key not in session.rollout_data:
        return None
    if session.key in call["keys"]:
        return None
    return Advice(arguments=call.replaced("keys", [*call["keys"], session.key]))


PATCHES = (
    Patch(
        name="micro-batches",
        group="capture",
        needs=("dump",),
        targets=(Target("slime.backends.megatron_utils.data", "DataIterator.get_next"),),
        relies_on=("self", "keys"),
        before=ask_for_positions,
        lost="The log-probs of this micro-batch are lost, and with them this rollout's train dump.",
        idle=lambda: capturing() is None,
    ),
)
