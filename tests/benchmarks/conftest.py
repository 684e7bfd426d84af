"""The benchmarks are no installed package: they are run from the root of the repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def run_json() -> Callable[..., Any]:
    """Run a benchmark as a user does; what it says with ``--json``."""

    def run(module: str, *arguments: str, **environment: str) -> Any:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SLIME_INSTRUMENT")}
        done = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json"],
            cwd=ROOT, env={**clean, **environment}, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
