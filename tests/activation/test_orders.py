"""Every order of import, arm, use and disarm, for each place in slime that is touched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_instrument._hooks import HOOKS

# What each step does to a process. ``alias`` is a plug-in of the user's that binds names with ``from x import y``.
STEPS = {
    "import": "import slime.backends.megatron_utils.actor, slime.ray.actor_group",
    "alias": "import plug_in",
    "arm": "si.instrument()",
    "use": "use()",
    "disarm": "si.uninstrument()",
}
ORDERS = [
    "arm import use disarm",
    "arm import alias use disarm",
    "import arm use disarm",
    "import alias arm use disarm",
    "import use arm disarm",
    "import alias use arm use disarm",
    "arm disarm import use",
    "import arm disarm use",
    "arm arm import use disarm disarm",
    "import arm disarm arm use disarm",
    "arm import disarm arm disarm arm use disarm",
    "arm import use",
    "disarm import arm use",
]
PROGRAM = """
import json, os, sys, types
os.environ["SLIME_INSTRUMENT"] = "0"   # only the steps below arm
import slime_instrument as si
from slime_instrument._hooks import HOOKS

def places():
    found = {}
    for patch in HOOKS:
        for target in patch.targets:
            module = sys.modules.get(target.module)
            owner = module
            *parents, name = target.attribute.split(".")
            for parent in parents:
                owner = getattr(owner, parent, None)
            if owner is not None and name in vars(owner):
                found[patch.name] = vars(owner)[name]
    return found

def use():
    from slime.backends.megatron_utils.actor import MegatronTrainRayActor, process_rollout_data
    from slime.ray.actor_group import RayTrainGroup
    args = types.SimpleNamespace(save_debug_train_data=None, train_env_vars={})
    actor = MegatronTrainRayActor()
    actor.init(args, "actor")
    assert process_rollout_data(args, {"tokens": []}, 0, 1) == {"tokens": []}
    assert actor.train_actor(0, {"tokens": []}) == 6
    assert RayTrainGroup(args).create() == {"NCCL": "0"}
    if "plug_in" in sys.modules:
        assert sys.modules["plug_in"].go() == 6

def wrapped(value):
    return hasattr(value, "__wrapped__")

originals = {}
def note():
    if not si.status().armed:
        for name, value in places().items():
            if not wrapped(value):
                originals.setdefault(name, value)

"""
ENDING = """
status = si.status()
now = places()
answer = {
    name: {
        "wrapped": wrapped(value), "calls": status[name].calls, "state": status[name].state,
        "original": value is originals.get(name, value) and not wrapped(value),
        "type": type(value).__name__,
    }
    for name, value in now.items()
}
answer["aliases"] = [
    name for name in ("policy_loss_function", "save_debug_train_data", "log_rollout_data", "process_rollout_data")
    if "plug_in" in sys.modules and wrapped(getattr(sys.modules["plug_in"], name))
]
"""
PLUG_IN = """
from slime.backends.megatron_utils.data import log_rollout_data
from slime.backends.megatron_utils.loss import policy_loss_function
from slime.utils.data import process_rollout_data
from slime.utils.train_dump_utils import save_debug_train_data
def go():
    return policy_loss_function({}, {}, 3, None)
"""
# But for positions in v0.2.0 and what newer releases do themselves, the fake slime has every target.
NAMES = [patch.name for patch in HOOKS]


@pytest.fixture(scope="module")
def outcome(
    uninstalled: Any, fake_slime: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    plug_in = tmp_path_factory.mktemp("plug_in")
    (plug_in / "plug_in.py").write_text(PLUG_IN)
    known: dict[str, dict[str, Any]] = {}

    def get(order: str) -> dict[str, Any]:
        if order not in known:
            steps = "\n".join(f"{STEPS[step]}; note()" for step in order.split())
            known[order] = uninstalled.answer(PROGRAM + steps + ENDING, path=[fake_slime, plug_in])
        return known[order]

    return get


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_target_is_wrapped_while_armed_and_the_original_otherwise(
    outcome: Callable[[str], dict[str, Any]], name: str, order: str
) -> None:
    steps = order.split()
    armed = "arm" in steps and "disarm" not in steps[len(steps) - steps[::-1].index("arm") :]
    place = outcome(order)[name]
    if armed:
        assert place["wrapped"] is True
        assert place["state"] == "ACTIVE"
    else:
        assert place["original"] is True
        assert place["state"] in ("REMOVED", "DISABLED")
    used_armed = "use" in steps[steps.index("arm") :] and ("disarm" not in steps or used_while_armed(steps))
    if used_armed and name != "data-fetch":  # a stand-in for a module counts no calls
        assert place["calls"] > 0
    if not used_while_armed(steps):
        assert place["calls"] == 0


def used_while_armed(steps: list[str]) -> bool:
    armed = False
    for step in steps:
        armed = step == "arm" or (armed and step != "disarm")
        if step == "use" and armed:
            return True
    return False


@pytest.mark.parametrize("order", [order for order in ORDERS if "alias" in order])
def test_names_that_a_plug_in_bound_before_or_after_are_the_original_again(
    outcome: Callable[[str], dict[str, Any]], order: str
) -> None:
    assert outcome(order)["aliases"] == []


def test_names_that_a_plug_in_bound_before_arming_are_repaired(
    uninstalled: Any, fake_slime: Path, tmp_path: Path
) -> None:
    (tmp_path / "plug_in.py").write_text(PLUG_IN)
    code = PROGRAM + "import plug_in\nsi.instrument()\nuse()" + ENDING
    answer = uninstalled.answer(code, path=[fake_slime, tmp_path])
    assert len(answer["aliases"]) == 4
    assert answer["policy-loss"]["calls"] == 2, "once by the trainer, once by the plug-in's alias"


def test_an_import_of_the_package_after_slime_arms_at_once_and_repairs_what_was_imported_by_name(
    uninstalled: Any, fake_slime: Path
) -> None:
    code = """
        import slime.backends.megatron_utils.actor as actor
        from slime.backends.megatron_utils.loss import policy_loss_function
        import slime_instrument as si
        status = si.status()
        answer = [status.armed, status.route, status["train-actor"].state, status["policy-loss"].reason]
    """
    armed, route, state, reason = uninstalled.answer(code, path=[fake_slime])
    assert (armed, route, state) == (True, "import slime_instrument", "ACTIVE")
    assert reason == "wrapped, 2 alias(es) repointed"


@pytest.mark.parametrize(("value", "wrapped"), [("0", False), ("off", False), (None, True), ("1", True)])
def test_an_import_of_the_package_arms_unless_the_variable_says_no(
    uninstalled: Any, fake_slime: Path, value: str | None, wrapped: bool
) -> None:
    code = """
        import slime_instrument
        import slime.backends.megatron_utils.actor as actor
        answer = hasattr(actor.MegatronTrainRayActor.train_actor, "__wrapped__")
    """
    variables = {} if value is None else {"SLIME_INSTRUMENT": value}
    assert uninstalled.answer(code, path=[fake_slime], **variables) is wrapped


def test_a_training_step_that_a_patch_never_saw_is_called_out_in_status(uninstalled: Any, fake_slime: Path) -> None:
    code = """
        import types
        import slime_instrument as si
        from slime.backends.megatron_utils.actor import MegatronTrainRayActor
        actor = MegatronTrainRayActor()
        actor.args = types.SimpleNamespace(save_debug_train_data=None)
        before = si.status()["start"].reason
        actor.train_actor(0, {})
        status = si.status()
        answer = [before, status["start"].reason, status["train-actor"].reason, "never called" in str(status)]
    """
    assert uninstalled.answer(code, path=[fake_slime]) == [
        "wrapped",
        "wrapped; never called although training ran: not needed in this run, or the original is called past it, by "
        "code that torch.compile compiled or by a partial or closure made before arming",
        "wrapped",
        True,
    ]
