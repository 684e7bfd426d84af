"""At interpreter start: ``.pth`` and ``.start`` arm when the variable says so, and are not there otherwise."""

from __future__ import annotations

import pkgutil
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SHOW = """
    import sys
    from slime_instrument._switch import route
    answer = {"route": route(), "heavy": sorted({"torch", "wrapt", "slime"} & set(sys.modules))}
"""
OFF_VALUES = ["0", "off", "False", "no", "", "  "]


def ours(import_times: str) -> list[str]:
    return [line for line in import_times.splitlines() if line.startswith("import time") and "slime" in line]


def test_nothing_of_ours_is_imported_when_the_variable_is_unset(installed: Any) -> None:
    shown = installed.run("-X", "importtime", "-c", "pass").stderr
    assert "site" in shown
    assert ours(shown) == []


@pytest.mark.parametrize("value", OFF_VALUES)
def test_nothing_of_ours_is_imported_when_the_variable_means_off(installed: Any, value: str) -> None:
    assert ours(installed.run("-X", "importtime", "-c", "pass", SLIME_INSTRUMENT=value).stderr) == []


@pytest.mark.parametrize("value", ["1", "on", "True", "yes", "2"])
def test_the_variable_arms_before_user_code_and_loads_nothing_heavy(installed: Any, value: str) -> None:
    shown = installed.run(
        "-X", "importtime", "-c", "import sys; assert 'slime_instrument._runtime' not in sys.modules",
        SLIME_INSTRUMENT=value,
    ).stderr  # fmt: skip
    assert any("slime_instrument._activation.boot" in line for line in ours(shown))
    assert not any(name in shown for name in ("| wrapt", "| torch", "slime_instrument._settings"))


def test_the_route_names_the_start_file_and_not_the_import_that_it_makes(installed: Any) -> None:
    assert installed.answer(SHOW, SLIME_INSTRUMENT="1") == {
        "route": "SLIME_INSTRUMENT in the environment (.pth)",
        "heavy": [],
    }


def test_a_later_import_keeps_the_route_of_the_start_file(installed: Any, fake_slime: Path) -> None:
    code = """
        import slime_instrument, slime.backends.megatron_utils.actor
        answer = slime_instrument.status().route
    """
    assert installed.answer(code, path=[fake_slime], SLIME_INSTRUMENT="1") == (
        "SLIME_INSTRUMENT in the environment (.pth)"
    )


def test_every_target_is_the_original_object_when_off(installed: Any, fake_slime: Path) -> None:
    code = """
        import sys, types
        import slime.backends.megatron_utils.actor as actor, slime.ray.actor_group as group
        from slime.backends.megatron_utils import data, loss, model
        from slime.utils import data as loader, train_dump_utils
        places = [
            actor.MegatronTrainRayActor.__dict__["init"], actor.MegatronTrainRayActor.__dict__["train_actor"],
            group.RayTrainGroup.__dict__["_allocate_gpus_for_actor"], data.DataIterator.__dict__["get_next"],
            data.log_rollout_data, loss.policy_loss_function, loss.get_log_probs_and_entropy, model.train_one_step,
            loader.process_rollout_data, train_dump_utils.save_debug_train_data, actor.save_debug_train_data,
        ]
        answer = {
            "plain": all(type(p) is types.FunctionType and not hasattr(p, "__wrapped__") for p in places),
            "ray": type(loader.ray).__name__,
            "ours": [name for name in sys.modules if name.startswith(("slime_instrument", "_slime_instrument"))],
        }
    """
    expected = {"plain": True, "ray": "SimpleNamespace", "ours": []}
    assert installed.answer(code, path=[fake_slime]) == expected
    assert installed.answer(code, path=[fake_slime], SLIME_INSTRUMENT="0") == expected
    # The same look, armed, sees wrappers: it could fail.
    assert installed.answer(code, path=[fake_slime], SLIME_INSTRUMENT="1")["plain"] is False


def test_the_start_entry_arms_as_python_3_15_would_call_it(installed: Any) -> None:
    (entry,) = (site_packages(installed) / "slime_instrument.start").read_text().split()
    code = f"""
        import pkgutil
        pkgutil.resolve_name({entry!r})()
        from slime_instrument._switch import route
        answer = route()
    """
    # The .pth is taken away: a Python that knows .start files ignores its import line.
    pth = site_packages(installed) / "slime_instrument.pth"
    hidden = pth.rename(pth.with_suffix(".hidden"))
    try:
        assert installed.answer(code, SLIME_INSTRUMENT="1") == "SLIME_INSTRUMENT in the environment (.start)"
        off = f"import pkgutil, sys; pkgutil.resolve_name({entry!r})(); answer = 'slime_instrument' in sys.modules"
        assert installed.answer(off) is False
    finally:
        hidden.rename(pth)


def test_both_start_files_in_one_process_arm_once(installed: Any) -> None:
    code = """
        import sys
        from _slime_instrument_start import start
        start()
        start()
        from slime_instrument._switch import route
        answer = [route(), sum(type(finder).__name__ == "SlimeWatch" for finder in sys.meta_path)]
    """
    assert installed.answer(code, SLIME_INSTRUMENT="1") == ["SLIME_INSTRUMENT in the environment (.pth)", 1]


@pytest.mark.parametrize("damage", ["_activation", "__init__.py", "package", "helper", "syntax"])
def test_a_half_removed_install_starts_silently(
    new_environment: Callable[[], Any], installed: Any, damage: str
) -> None:
    broken = new_environment()
    target = site_packages(broken)
    for name in ("slime_instrument", "slime_instrument.pth", "slime_instrument.start", "_slime_instrument_start.py"):
        source = site_packages(installed) / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target / name)
    assert broken.answer(SHOW, SLIME_INSTRUMENT="1")["route"] is not None, "whole, it arms"
    if damage == "_activation":
        shutil.rmtree(target / "slime_instrument" / "_activation")
    elif damage == "__init__.py":
        (target / "slime_instrument" / "__init__.py").unlink()
    elif damage == "package":
        shutil.rmtree(target / "slime_instrument")
    elif damage == "helper":
        (target / "_slime_instrument_start.py").unlink()
    else:
        (target / "slime_instrument" / "_activation" / "boot.py").write_text("def boot(:\n")
    done = broken.run("-c", "print('user code ran')", SLIME_INSTRUMENT="1")
    assert (done.stdout, done.stderr) == ("user code ran\n", "")


def test_a_missing_dependency_is_logged_when_slime_is_imported_and_slime_still_works(
    new_environment: Callable[[], Any], installed: Any, fake_slime: Path
) -> None:
    bare = new_environment()
    for name in ("slime_instrument", "slime_instrument.pth", "_slime_instrument_start.py"):
        source = site_packages(installed) / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, site_packages(bare) / name)
    (site_packages(bare) / "dependencies.pth").unlink()
    done = bare.run(
        "-c",
        "from slime.backends.megatron_utils.loss import policy_loss_function as f; print(f({}, {}, 2, None))",
        path=[fake_slime],
        SLIME_INSTRUMENT="1",
    )
    assert done.stdout == "4\n"
    assert "could not arm; training goes on without instrumentation" in done.stderr
    assert re.search("ModuleNotFoundError: No module named '(torch|wrapt)'", done.stderr)


def test_the_path_file_has_one_line_and_only_asks_the_environment_first() -> None:
    folder = Path(__file__).resolve().parents[2] / "slime_instrument" / "_activation"
    (line,) = (folder / "slime_instrument.pth").read_text().splitlines()
    assert line.startswith("import os; ")
    assert line.index("SLIME_INSTRUMENT") < line.index("_slime_instrument_start")
    (entry,) = (folder / "slime_instrument.start").read_text().splitlines()
    module, _, function = entry.partition(":")
    assert module == "_slime_instrument_start"
    assert any(info.name == module for info in pkgutil.iter_modules([str(folder)]))
    assert function == "start"


@pytest.mark.alone
def test_start_up_costs_less_than_15_ms_armed_and_nothing_measurable_off(installed: Any) -> None:
    """Interleaved runs, so that a busy machine disturbs all alike; medians of the differences."""

    def start(**variables: str) -> float:
        environment = installed.environment([], **variables)
        began = time.perf_counter()
        subprocess.run([installed.python, "-c", "pass"], env=environment, check=True)
        return time.perf_counter() - began

    off, armed = [], []
    for _ in range(15):
        base = start(SLIME_INSTRUMENT="0")
        off.append(start() - base)
        armed.append(start(SLIME_INSTRUMENT="1") - base)
    assert statistics.median(armed) < 0.015
    assert abs(statistics.median(off)) < 0.010


def site_packages(interpreter: Any) -> Path:
    (found,) = interpreter.python.parents[1].glob("lib/python*/site-packages")
    return found
