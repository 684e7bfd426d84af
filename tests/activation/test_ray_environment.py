"""The driver's side of Ray, without Ray: what is carried to the train actors, and what is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_instrument._hooks.start import carried

USE = """
    import types
    from slime.ray.actor_group import RayTrainGroup
    def group(given, dump="{rollout_id}.pt"):
        args = types.SimpleNamespace(save_debug_train_data=dump, train_env_vars=given)
        group = RayTrainGroup(args)
        environment = group.create()
        return environment, args.train_env_vars is given
"""
CARRIED = "import slime_instrument, carried to the train actors by an armed driver"


def test_an_armed_driver_carries_the_switch_all_settings_and_its_route(installed: Any, fake_slime: Path) -> None:
    code = "import slime_instrument" + USE.replace("\n    ", "\n") + "answer = group({'MINE': '1'})"
    environment, put_back = installed.answer(
        code, path=[fake_slime], SLIME_INSTRUMENT_EVERY="5", SLIME_INSTRUMENT_PIN="0,7-9", OTHER="x"
    )
    assert environment == {
        "NCCL": "0",
        "MINE": "1",
        "SLIME_INSTRUMENT": "1",
        "SLIME_INSTRUMENT_EVERY": "5",
        "SLIME_INSTRUMENT_PIN": "0,7-9",
        "SLIME_INSTRUMENT_ROUTE": CARRIED,
    }
    assert put_back is True


def test_what_the_user_put_there_wins(installed: Any, fake_slime: Path) -> None:
    code = (
        "import slime_instrument"
        + USE.replace("\n    ", "\n")
        + ("answer = group({'SLIME_INSTRUMENT': '0', 'SLIME_INSTRUMENT_EVERY': '2'})")
    )
    environment, _ = installed.answer(code, path=[fake_slime], SLIME_INSTRUMENT_EVERY="5")
    assert (environment["SLIME_INSTRUMENT"], environment["SLIME_INSTRUMENT_EVERY"]) == ("0", "2")


def test_without_a_dump_asked_for_nothing_is_carried(installed: Any, fake_slime: Path) -> None:
    code = "import slime_instrument" + USE.replace("\n    ", "\n") + "answer = group({}, dump=None)"
    assert installed.answer(code, path=[fake_slime]) == [{"NCCL": "0"}, True]


def test_a_driver_that_is_off_carries_nothing(installed: Any, fake_slime: Path) -> None:
    code = USE.replace("\n    ", "\n") + "answer = group({})"
    assert installed.answer(code, path=[fake_slime]) == [{"NCCL": "0"}, True]


def test_the_arguments_are_put_back_when_the_group_cannot_be_made(installed: Any, fake_slime: Path) -> None:
    code = """
        import types
        import slime_instrument as si
        from slime.ray.actor_group import RayTrainGroup
        args = types.SimpleNamespace(save_debug_train_data="x", train_env_vars={"MINE": "1"})
        group = RayTrainGroup(args)
        group.__class__ = type("Broken", (RayTrainGroup,), {"__setattr__": lambda *_: 1 / 0})
        try:
            group.create()
        except ZeroDivisionError:
            status = si.status()["ray-environment"]
            answer = [args.train_env_vars, status.calls, status.failures]
    """
    assert installed.answer(code, path=[fake_slime]) == [{"MINE": "1"}, 1, 0]


@pytest.mark.parametrize("given", ["None", "'A=1'"])
def test_what_is_no_mapping_is_left_for_slime_to_complain_about(installed: Any, fake_slime: Path, given: str) -> None:
    code = (
        "import slime_instrument"
        + USE.replace("\n    ", "\n")
        + (f"try:\n    group({given})\nexcept TypeError as error:\n    answer = str(error)")
    )
    assert "not a mapping" in installed.answer(code, path=[fake_slime])


def test_a_driver_without_start_files_warns_that_its_actors_may_not_be_armed(
    uninstalled: Any, installed: Any, fake_slime: Path
) -> None:
    code = "import slime_instrument" + USE.replace("\n    ", "\n") + "group({})"
    warned = uninstalled.run("-c", code, path=[fake_slime]).stderr
    assert "the train actors may not be armed: slime_instrument.pth is not in the site-packages" in warned
    assert installed.run("-c", code, path=[fake_slime]).stderr == ""


def test_a_driver_armed_through_pythonpath_does_not_warn(uninstalled: Any, fake_slime: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "sitecustomize_example"
    code = USE.replace("\n    ", "\n") + "environment, _ = group({})\nprint(environment['SLIME_INSTRUMENT_ROUTE'])"
    done = uninstalled.run("-c", code, path=[example, fake_slime], SLIME_INSTRUMENT="1")
    assert done.stderr == ""
    assert done.stdout.startswith("sitecustomize on PYTHONPATH, carried")


def test_a_route_that_was_carried_here_is_not_described_twice() -> None:
    assert carried({}, CARRIED)["SLIME_INSTRUMENT_ROUTE"] == CARRIED


def test_a_process_below_a_carried_route_reports_that_route(installed: Any, fake_slime: Path) -> None:
    code = "import slime_instrument; answer = slime_instrument.status().route"
    variables = carried({"SLIME_INSTRUMENT_EVERY": "3"}, "slime-instrument run")
    assert installed.answer(code, path=[fake_slime], **variables) == (
        "slime-instrument run, carried to the train actors by an armed driver"
    )


@pytest.mark.parametrize(
    ("value", "route"), [("0", None), (None, "worker_process_setup_hook"), ("1", "worker_process_setup_hook")]
)
def test_the_setup_hook_arms_unless_the_variable_says_no(
    uninstalled: Any, value: str | None, route: str | None
) -> None:
    code = """
        import importlib
        module, _, name = "slime_instrument._activation.boot.worker_process_setup_hook".rpartition(".")
        returned = getattr(importlib.import_module(module), name)()
        from slime_instrument._switch import route
        answer = [returned, route()]
    """
    variables = {} if value is None else {"SLIME_INSTRUMENT": value}
    assert uninstalled.answer(code, **variables) == [None, route]


def test_with_the_start_file_there_too_the_hook_keeps_its_route(installed: Any) -> None:
    code = """
        from slime_instrument._activation.boot import worker_process_setup_hook
        from slime_instrument._switch import route
        worker_process_setup_hook()
        answer = route()
    """
    assert installed.answer(code, SLIME_INSTRUMENT="1") == "SLIME_INSTRUMENT in the environment (.pth)"
