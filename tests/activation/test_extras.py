"""From the built wheel: each extra alone in an environment of its own, and each command that the README gives to it.

Here an environment holds what the wheel declares and nothing else, taken from the packages that the tests run with.
``make test-full`` lets pip make it, for the Pythons in ``$SLIME_INSTRUMENT_TEST_PYTHONS`` (default: this one).
"""

from __future__ import annotations

import functools
import os
import pty
import re
import select
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..report.dumps import write_run
from .conftest import Interpreter, pip, site_packages

TORCH = "torch==2.13.0"
#: Extra -> the commands that need it. ``view`` wants a terminal and has a test of its own.
COMMANDS: dict[str, tuple[str, ...]] = {
    "": (
        "status --json",
        "inspect train_data/0.pt --json",
        "inspect rollout_data/0.pt --sample 1",
        "validate train_data/0.pt --rollout rollout_data/0.pt",
        "compare rollout_data/0.pt train_data/0.pt",
        "compare rollout_data/0.pt train_data/0.pt --json",
    ),
    "analysis": ("export train_data/0.pt -o flat.parquet", "export train_data/0.pt -o flat.parquet --level token"),
    "report": ("report . -o page.html",),
    "view": (),
    "lab": ("demo --out trained",),
}
#: Not ``report``: torch itself brings jinja2, and only ``--tokenizer`` needs more.
NEEDS_MORE = {"export train_data/0.pt -o flat.parquet": "analysis", "view .": "view"}


@dataclass(frozen=True)
class Environment:
    extra: str
    interpreter: Interpreter

    def command(self, line: str, folder: Path) -> subprocess.CompletedProcess[str]:
        program = self.interpreter.python.with_name("slime-instrument")
        return subprocess.run(
            [str(program), *line.split()], cwd=folder, env=self.interpreter.environment([]), capture_output=True,
            text=True, timeout=300, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip


Make = Callable[[str], Environment]


@pytest.fixture(scope="module", params=["closure", pytest.param("pip", marks=pytest.mark.full)])
def make(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Make]:
    """For each Python, a function that makes the environment of an extra."""
    folder = tmp_path_factory.mktemp("extras")
    if request.param == "closure":
        return [functools.cache(lambda extra: _from_here(folder, wheel, extra))]
    pythons = os.environ.get("SLIME_INSTRUMENT_TEST_PYTHONS", sys.executable).split()
    return [_by_pip(folder / str(number), wheel, python) for number, python in enumerate(pythons)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", rollouts=2)


def empty_environment(folder: Path, python: str) -> Interpreter:
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    return Interpreter(folder / "bin" / "python")


def _from_here(folder: Path, wheel: Path, extra: str) -> Environment:
    """Links to the packages of this environment that the wheel asks for, directly or not."""
    found = folder / (extra or "none")
    interpreter = empty_environment(found, str(Path(sys.base_prefix, "bin", Path(sys.executable).name)))
    site = site_packages(interpreter.python)
    for name in closure(wheel_metadata(wheel), extra):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))  # type: ignore[arg-type]
    pip("--python", interpreter.python, "install", "--quiet", "--no-deps", wheel)
    return Environment(extra, interpreter)


def wheel_metadata(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(archive.read(name).decode())


def closure(of: Message, extra: str) -> set[str]:
    """Names of all distributions that ``of`` needs with this extra."""
    found: set[tuple[str, str]] = set()
    pending = [(text, extra) for text in of.get_all("Requires-Dist") or ()]
    while pending:
        text, with_extra = pending.pop()
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": with_extra}):
            continue
        for wanted in requirement.extras or {""}:
            key = canonicalize_name(requirement.name), wanted
            if key not in found:
                found.add(key)
                pending += [(text, wanted) for text in metadata.distribution(key[0]).requires or ()]
    return {name for name, _ in found}


def _by_pip(folder: Path, wheel: Path, python: str) -> Make:
    """Environments on top of one that has what the wheel always needs: torch is installed once."""
    base = empty_environment(folder / "base", python)
    pip("--python", base.python, "install", "--quiet", TORCH, wheel)
    pip("--python", base.python, "uninstall", "--quiet", "--yes", "slime-instrument")

    @functools.cache
    def with_extra(extra: str) -> Environment:
        interpreter = empty_environment(folder / (extra or "none"), python)
        (site_packages(interpreter.python) / "base.pth").write_text(f"{site_packages(base.python)}\n")
        wanted = f"{wheel}[{extra}]" if extra else wheel
        pip("--python", interpreter.python, "install", "--quiet", wanted)
        return Environment(extra, interpreter)

    return with_extra


@pytest.mark.parametrize(
    "extra", [pytest.param(extra, marks=[pytest.mark.full] if extra == "lab" else []) for extra in COMMANDS]
)
def test_each_command_works_with_its_extra_alone(make: list[Make], extra: str, run: Path) -> None:
    for environment in (one(extra) for one in make):
        for line in COMMANDS[extra]:
            done = environment.command(line, run)
            assert done.returncode == 0, f"{line}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
            assert done.stderr == "", f"{line}: {done.stderr}"


@pytest.mark.parametrize("line", NEEDS_MORE)
def test_a_command_without_its_extra_says_in_one_line_what_to_install(make: list[Make], line: str, run: Path) -> None:
    for environment in (one("") for one in make):
        done = environment.command(line, run)
        assert done.returncode == 2, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1
        assert f"slime-instrument[{NEEDS_MORE[line]}]" in done.stderr


def test_the_viewer_opens_and_closes_in_a_terminal(make: list[Make], run: Path) -> None:
    for environment in (one("view") for one in make):
        program = environment.interpreter.python.with_name("slime-instrument")
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [str(program), "view", "."], cwd=run, stdin=theirs, stdout=theirs, stderr=theirs,
            env=environment.interpreter.environment([], TERM="xterm-256color", COLUMNS="100", LINES="40"),
        )  # fmt: skip
        os.close(theirs)
        shown = watch(ours, process)
        os.close(ours)
        assert process.returncode == 0, shown
        assert "Traceback" not in shown
        assert "rollout" in shown


def watch(terminal: int, process: subprocess.Popen[bytes]) -> str:
    """Press q until the program ends, and return what it wrote, without escape codes."""
    shown, deadline = b"", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.5)[0]:
            try:
                shown += os.read(terminal, 1 << 16)
            except OSError:
                break
        elif shown:
            os.write(terminal, b"q")
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return re.sub(r"\x1b[\[(?>=][0-9;?]*[ -/]*[@-~]?", "", shown.decode(errors="replace"))
