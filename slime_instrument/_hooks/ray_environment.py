"""Driver: an armed driver's settings reach the train actors, through slime's own ``--train-env-vars``.

An import in ``train.py`` never reaches the Ray workers that train. The environment of an actor does, at its
interpreter's start. What the user put there is left alone, so ``SLIME_INSTRUMENT=0`` there switches the actors off.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from slime_instrument import _runtime as runtime
from slime_instrument._activation.boot import ROUTE_VARIABLE
from slime_instrument._activation.installation import advice
from slime_instrument._activation.switch import PREFIX
from slime_instrument._patching.declaration import Advice, Call, Patch, Target

__all__ = ["carried", "carry_settings"]

logger = logging.getLogger("slime_instrument")
_CARRIED = "carried to the train actors by an armed driver"


def carry_settings(call: Call) -> Advice | None:
    args = call["self"].args
    given = getattr(args, "train_env_vars", None)
    if getattr(args, "save_debug_train_data", None) is None or not isinstance(given, Mapping):
        return None
    route = runtime.current().route
    missing = advice()
    # Armed through PYTHONPATH, the actors are as well: slime's jobs hand it on in their runtime_env.
    if missing is not None and "PYTHONPATH" not in route:
        logger.warning("slime_instrument: the train actors may not be armed: %s", missing)
    args.train_env_vars = {**carried(os.environ, route), **given}

    def put_back() -> None:
        args.train_env_vars = given

    return Advice(cleanup=put_back)


def carried(environment: Mapping[str, str], route: str) -> dict[str, str]:
    """Every ``SLIME_INSTRUMENT*`` variable of this process, armed, with how it came to be so."""
    ours = {name: value for name, value in environment.items() if name == PREFIX or name.startswith(PREFIX + "_")}
    described = route if _CARRIED in route else f"{route}, {_CARRIED}"
    return {**ours, PREFIX: "1", ROUTE_VARIABLE: described}


PATCHES = (
    Patch(
        name="ray-environment",
        group="ray",
        # The one method that reads args.train_env_vars, in every release.
        targets=(Target("slime.ray.actor_group", "RayTrainGroup._allocate_gpus_for_actor"),),
        relies_on=("self",),
        before=carry_settings,
        optional=True,
    ),
)
