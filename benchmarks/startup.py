"""``python -m benchmarks.startup``: interpreter starts without the package, with it installed and off, and with it on.

Two virtual environments without pip, one of them with what a wheel would put into site-packages. Starts take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.timing import Figure, machine

__all__ = ["measure"]

_PACKAGE = Path(__file__).resolve().parents[1] / "slime_instrument"
_IMPORT = "import time; began = time.perf_counter(); import slime_instrument; print(time.perf_counter() - began)"
_HEAVY = "import slime_instrument, sys; print([name for name in ('torch', 'wrapt', 'numpy') if name in sys.modules])"


def measure(repeats: int = 40) -> dict[str, Any]:
    """Seconds per interpreter start for each way and for ``import slime_instrument``; what that import brings along."""
    with tempfile.TemporaryDirectory(prefix="startup_") as folder:
        without, installed = (_environment(Path(folder) / name) for name in ("without", "installed"))
        _install(installed)
        ways = {
            "without": (without, {}),
            "installed_off": (installed, {}),
            "installed_0": (installed, {"SLIME_INSTRUMENT": "0"}),
            "on": (installed, {"SLIME_INSTRUMENT": "1"}),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        imports: list[float] = []
        for repetition in range(repeats + 2):
            for name in list(ways) if repetition % 2 else reversed(ways):
                python, extra = ways[name]
                began = time.perf_counter()
                _run(python, "pass", extra)
                if repetition >= 2:  # the first starts read the files from the disk
                    seconds[name].append(time.perf_counter() - began)
            imports.append(float(_run(installed, _IMPORT, {})))
        return {
            "machine": machine(),
            "python": sys.version.split()[0],
            "start_s": {name: Figure.of(values).as_dict() for name, values in seconds.items()},
            "off_adds_s": _difference(seconds, "installed_off"),
            "on_adds_s": _difference(seconds, "on"),
            "import_s": Figure.of(imports[2:]).as_dict(),
            "import_brings": _run(installed, _HEAVY, {}).strip(),
        }


def _difference(seconds: dict[str, list[float]], way: str) -> dict[str, float]:
    pairs = zip(seconds[way], seconds["without"], strict=True)
    return Figure.of([one - without for one, without in pairs]).as_dict()


def _environment(folder: Path) -> Path:
    venv.create(folder, with_pip=False, symlinks=True)
    return folder / "bin" / "python"


def _install(python: Path) -> None:
    """What the wheel holds, without building one."""
    site = Path(_run(python, "import sysconfig; print(sysconfig.get_path('purelib'))", {}).strip())
    shutil.copytree(_PACKAGE, site / "slime_instrument", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("slime_instrument.pth", "slime_instrument.start", "_slime_instrument_start.py"):
        shutil.copy(_PACKAGE / "_activation" / name, site / name)
    _run(python, "import slime_instrument, slime_instrument._activation.boot", {"SLIME_INSTRUMENT": "1"})  # byte code


def _run(python: Path, code: str, extra: dict[str, str]) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLIME_INSTRUMENT", "PYTHON"))}
    done = subprocess.run([python, "-c", code], env={**clean, **extra}, capture_output=True, text=True, check=True)
    return done.stdout


def _table(found: dict[str, Any]) -> str:
    lines = [f"Python {found['python']}, {machine()}", "", f"{'interpreter start':24}{'ms':>8}{'middle half':>18}"]
    for name, figure in found["start_s"].items():
        half = f"{1e3 * figure['q1']:.1f}–{1e3 * figure['q3']:.1f}"
        lines.append(f"{name:24}{1e3 * figure['median']:>8.1f}{half:>18}")
    for name, text in (
        ("off_adds_s", "installed and off adds"),
        ("on_adds_s", "on adds"),
        ("import_s", "import slime_instrument"),
    ):
        figure = found[name]
        half = f"{1e3 * figure['q1']:.2f}–{1e3 * figure['q3']:.2f}"
        lines.append(f"{text:24}{1e3 * figure['median']:>8.2f}{half:>18}")
    lines.append(f"the import brings along, of torch, wrapt and numpy: {found['import_brings']}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    found = measure(given.repeats)
    print(json.dumps(found, indent=2) if given.json else _table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
