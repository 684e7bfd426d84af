"""Usage errors, help and start-up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from typing import Any

import pytest


@pytest.mark.parametrize(
    "arguments", [["inspect"], ["validate"], ["nonsense"], ["demo"], ["run"], ["inspect", "a.pt", "--sample", "x"]]
)
def test_wrong_usage_is_exit_2_on_stderr(call: Any, arguments: list[str]) -> None:
    outcome = call(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err


@pytest.mark.parametrize(
    "command",
    ["status", "check", "run", "demo", "inspect", "validate", "compare", "report", "view", "export", "convert"],
)
def test_help_of_every_command_has_an_example(call: Any, command: str) -> None:
    outcome = call(command, "--help")
    assert outcome.code == 0
    assert re.search("Examples?: *slime-instrument|Examples?: *SLIME_INSTRUMENT", outcome.out)


def test_the_version_is_printed(call: Any) -> None:
    from slime_instrument import __version__

    assert call("--version").out == f"slime-instrument {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\n"
        "from slime_instrument._cli.app import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'wrapt', 'megatron', 'polars', 'ray'} & set(sys.modules)), file=sys.stderr)\n"
    )
    environment = {**os.environ, "SLIME_INSTRUMENT": "0"}
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stderr == "[]\n"
    assert time.monotonic() - began < 10
