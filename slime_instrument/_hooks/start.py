"""Start of training: what cannot work is refused here, not after an hour; and one line says that we are in."""

from __future__ import annotations

from slime_instrument import _runtime as runtime
from slime_instrument._dump.contribute import megatron_is_up, read_topology
from slime_instrument._dump.file import dump_template
from slime_instrument._patching.declaration import Advice, Call, Patch, Target


def check_run(call: Call) -> Advice | None:
    args = call["args"]
    current = runtime.current()
    if call.get("role", "actor") != "actor" or getattr(args, "debug_rollout_only", False):
        return None
    if getattr(args, "save_debug_train_data", None) is None:
        return None
    current.refuse_bad_settings()
    current.dumps.check(args)

    def started(result: object) -> object:
        if megatron_is_up():
            current.patcher.settle()
            states = [(r.patch.name, str(r.state), r.reason) for r in current.patcher]
            current.dumps.start(args, states, current.route)
            current.log_armed(dump_template(args), details=read_topology().is_writer)
        return result

    return Advice(after=started)


PATCHES = (
    Patch(
        name="start",
        group="start",
        targets=(Target("slime.backends.megatron_utils.actor", "MegatronTrainRayActor.init"),),
        relies_on=("self", "args", "role"),
        before=check_run,
        lost="The checks at the start of training are lost.",
        optional=True,
    ),
)
