"""Driver: an armed driver's settings reach the train actors, through slime's own ``--train-env-vars``.

An import in ``train.py`` never reaches the Ray workers that train. The environment of an actor does, at its
interpreter's start. What the user put there is left alone, so ``SLIME_INSTRUMENT=0`` there switches the actors off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping

from slime_instrument._hooks.process import Process, dump_is_asked_for
from slime_instrument._installation import advice
from slime_instrument._log import log
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
