"""Start of training: what cannot work is refused here, not after an hour; and one line says that we are in."""

from __future__ import annotations

from collections.abc import Iterator

from slime_instrument._dump.agree import megatron_is_up
from slime_instrument._hooks.process import Process, dump_is_asked_for
from slime_instrument._patching.patch import Call, around
from slime_instrument._switch import package


@around(
    "start",
    f"{package()}.backends.megatron_utils.actor:MegatronTrainRayActor.init",
    takes=("args",),
    optional=True,
    on_failure="The checks at the start of training are lost.",
)
def check_run(call: Call) -> Iterator[None]:
    process: Process = call.process
    args = process.args = call["args"]
    if call.get("role", "actor") != "actor" or getattr(args, "debug_rollout_only", False):
        return
    if not dump_is_asked_for(args):
        return
    process.refuse_bad_settings()
    process.dumper.check(args)
    yield
    if megatron_is_up():
        process.training_started(args)
