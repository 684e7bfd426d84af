"""Wheel, sdist, editable install: what they hold, that they arm, and that removing them leaves nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT, pip, site_packages

ROUTE = "from slime_instrument._switch import route; answer = route()"
AT_THE_ROOT = ("slime_instrument.pth", "slime_instrument.start", "_slime_instrument_start.py")


def test_the_wheel_holds_the_start_files_types_and_the_miniature(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {*AT_THE_ROOT, "slime_instrument/py.typed"} <= names
    in_sources = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "slime_instrument").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name not in AT_THE_ROOT
    }
    # Whatever is in the package is in the wheel, the miniature and its stubs too.
    assert "slime_instrument/lab/miniature/slime/backends/megatron_utils/actor.py" in in_sources
    assert sorted(in_sources - names) == []
    beside = {name for name in names if not name.startswith("slime_instrument/")} - set(AT_THE_ROOT)
    assert {name.split("/")[0].split("-")[0] for name in beside} == {"slime_instrument"}, "only metadata besides"


def test_the_wheel_is_for_every_platform_and_registers_the_plugin(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    archive = zipfile.ZipFile(wheel)
    (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    text = archive.read(entry_points).decode()
    assert "[pytest11]\nslime_instrument = slime_instrument._activation.pytest_plugin" in text
    assert "slime-instrument = slime_instrument._cli.app:main" in text


def test_the_sdist_builds_the_same_wheel(sources: Path, wheel: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    pip("install", "--quiet", "--target", tools, "hatchling")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)],
        cwd=sources,
        env={**os.environ, "PYTHONPATH": str(tools)},
        check=True,
    )
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path / "unpacked", **({"filter": "data"} if sys.version_info >= (3, 12) else {}))
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert (unpacked / "sitecustomize_example" / "sitecustomize.py").is_file()
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path / "wheel", unpacked)
    (again,) = (tmp_path / "wheel").iterdir()
    first, second = zipfile.ZipFile(wheel), zipfile.ZipFile(again)
    assert sorted(first.namelist()) == sorted(second.namelist())
    assert all(first.read(name) == second.read(name) for name in first.namelist() if not name.endswith("RECORD"))


def test_removing_the_wheel_leaves_nothing_behind(
    new_environment: Callable[[], Any], wheel: Path, fake_slime: Path
) -> None:
    interpreter = new_environment()
    before = everything(interpreter)
    pip("--python", interpreter.python, "install", "--quiet", "--no-deps", wheel)
    code = f"import slime.backends.megatron_utils.actor; {ROUTE}; import slime_instrument._runtime"
    # Used, so that there is bytecode to leave behind.
    interpreter.answer(code, path=[fake_slime], SLIME_INSTRUMENT="1")
    assert everything(interpreter) > before
    pip("--python", interpreter.python, "uninstall", "--quiet", "--yes", "slime-instrument")
    assert everything(interpreter) == before
    done = interpreter.run("-c", "import slime.backends.megatron_utils.actor", path=[fake_slime], SLIME_INSTRUMENT="1")
    assert (done.stdout, done.stderr) == ("", "")


def test_an_editable_install_arms_too_and_is_removed_whole(
    new_environment: Callable[[], Any], sources: Path, tmp_path: Path
) -> None:
    interpreter, checkout = new_environment(), tmp_path / "checkout"
    shutil.copytree(sources, checkout)
    before = everything(interpreter)
    pip("--python", interpreter.python, "install", "--quiet", "--no-deps", "--editable", checkout)
    code = f"{ROUTE}; import slime_instrument; answer = [answer, slime_instrument.__file__]"
    assert interpreter.answer(code, SLIME_INSTRUMENT="1") == [
        "SLIME_INSTRUMENT in the environment (.pth)",
        str(checkout / "slime_instrument" / "__init__.py"),
    ]
    off = interpreter.run("-X", "importtime", "-c", "pass").stderr
    assert "slime" not in off
    (checkout / "slime_instrument" / "_activation" / "boot.py").unlink()
    assert interpreter.run("-c", "pass", SLIME_INSTRUMENT="1").stderr == "", "a checkout that is half there is silent"
    pip("--python", interpreter.python, "uninstall", "--quiet", "--yes", "slime-instrument")
    assert everything(interpreter) == before


def test_the_start_file_is_found_where_it_is_installed_and_missed_where_it_is_not(
    installed: Any, uninstalled: Any
) -> None:
    code = """
        from slime_instrument._installation import advice, startup_file
        answer = [str(startup_file()), advice()]
    """
    assert installed.answer(code) == [str(site_packages(installed.python) / "slime_instrument.pth"), None]
    found, advice = uninstalled.answer(code)
    assert found == "None"
    assert "SLIME_INSTRUMENT=1 alone arms nothing here" in advice


def test_the_installed_version_is_the_packages_own(installed: Any) -> None:
    code = """
        import importlib.metadata, slime_instrument
        answer = [importlib.metadata.version("slime-instrument"), slime_instrument.__version__]
    """
    version, own = installed.answer(code)
    assert version == own


def other_pythons() -> list[str]:
    """Interpreters from 3.10 on, of other minor versions than this one: on PATH, and those of pyenv."""
    found: dict[str, str] = {}
    for minor in range(10, 17):
        name = f"python3.{minor}"
        candidates = [shutil.which(name), *map(str, sorted(Path.home().glob(f".pyenv/versions/*/bin/{name}")))]
        working = [python for python in candidates if python and works(python)]
        if minor != sys.version_info.minor and working:
            found[name] = working[0]
    return list(found.values())


def works(python: str) -> bool:
    return subprocess.run([python, "-c", "import venv"], capture_output=True).returncode == 0


def test_every_other_python_of_this_machine_arms_and_patches_and_is_silent_when_off(
    wheel: Path, tmp_path: Path, new_environment: Callable[[], Any], fake_slime: Path
) -> None:
    pythons = other_pythons()
    if not pythons:
        pytest.skip("no other Python from 3.10 on is here")
    interpreter = new_environment()
    for python in pythons:
        folder = tmp_path / Path(python).name
        subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
        interpreter.python = folder / "bin" / "python"
        zipfile.ZipFile(wheel).extractall(site_packages(interpreter.python))
        start_file = ".start" if int(python.rpartition(".")[2]) >= 15 else ".pth"
        assert interpreter.answer(ROUTE, SLIME_INSTRUMENT="1") == (
            f"SLIME_INSTRUMENT in the environment ({start_file})"
        )
        off = interpreter.answer("import sys; answer = [m for m in sys.modules if m.startswith('slime_instr')]")
        assert off == []
        pip("--python", interpreter.python, "install", "--quiet", "wrapt")
        patched = """
            import slime.backends.megatron_utils.actor, slime.ray.actor_group, slime_instrument, sys
            answer = sorted({patch.state for patch in slime_instrument.status()}), "torch" in sys.modules
        """
        # Arming needs no torch; whatever dumps does.
        assert interpreter.answer(patched, path=[fake_slime], SLIME_INSTRUMENT="1") == [["ACTIVE"], False]


def everything(interpreter: Any) -> set[str]:
    root = interpreter.python.parents[1]
    return {path.relative_to(root).as_posix() for path in root.rglob("*")}
