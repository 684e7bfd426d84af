"""Before training: an armed driver hands its settings on, and each trainer refuses what cannot work.

An import in ``train.py`` never reaches the Ray workers that train. The environment of an actor does, at its
interpreter's start, through slime's own ``--train-env-vars``. What the user put there is left alone, so
``SLIME_INSTRUMENT=0`` there switches the actors off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping

from slime_instrument._dump.agree import megatron_is_up
from slime_instrument._errors import log
from slime_instrument._hooks.capture import Process, dump_is_asked_for
from slime_instrument._installation import advice
from slime_instrument._patching.patch import Call, around
from slime_instrument._switch import PREFIX, ROUTE_VARIABLE, package

_CARRIED = "carried to the train actors by an armed driver"


@around(
    "ray-environment",
    # The one method that reads args.train_env_vars, in every release.
    f"{package()}.ray.actor_group:RayTrainGroup._allocate_gpus_for_actor",
    takes=("self",),
    optional=True,
)
def carry_settings(call: Call) -> Iterator[None]:
    process: Process = call.process
    args = call["self"].args
    given = getattr(args, "train_env_vars", None)
    if not dump_is_asked_for(args) or not isinstance(given, Mapping):
        return
    missing = advice()
    # Armed through PYTHONPATH, the actors are as well: slime's jobs hand it on in their runtime_env.
    if missing is not None and "PYTHONPATH" not in process.route:
        log(logging.WARNING, "slime_instrument: the train actors may not be armed: %s", missing)
    args.train_env_vars = {**carried(os.environ, process.route), **given}
    try:
        yield
    finally:
        args.train_env_vars = given


def carried(environment: Mapping[str, str], route: str) -> dict[str, str]:
    """Every ``SLIME_INSTRUMENT*`` variable of this process, armed, with how it came to be so."""
    ours = {name: value for name, value in environment.items() if name == PREFIX or name.startswith(PREFIX + "_")}
    described = route if _CARRIED in route else f"{route}, {_CARRIED}"
    return {**ours, PREFIX: "1", ROUTE_VARIABLE: described}


@around(
    "start",
    f"{package()}.backends.megatron_utils.actor:MegatronTrainRayActor.init",
    takes=("args",),
    optional=True,
    on_failure="The checks at the start of training are lost.",
)
def check_run(call: Call) -> Iterator[None]:
    """What cannot work is refused here, not after an hour; and one line says that we are in."""
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
