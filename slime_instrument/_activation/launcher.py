"""``slime-instrument run``: replace this process with the command, in an environment that arms it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from typing import NoReturn

from slime_instrument._errors import InstrumentError, five_parts
from slime_instrument._installation import advice
from slime_instrument._settings import Settings
from slime_instrument._switch import PREFIX, ROUTE_VARIABLE

__all__ = ["announcement", "launch"]

ROUTE = "slime-instrument run"


def launch(command: list[str]) -> NoReturn:
    """Replace this process by ``command``, armed; same process id, environment, terminal and signals.

    One line on stderr says what will be patched. Raises :class:`InstrumentError` when there is no such command, and
    :class:`~slime_instrument._errors.SettingsError` when a setting has a value that the command would refuse later.
    """
    if not command:
        raise _refusal("a command", "none", "Nothing was started.", "Try: slime-instrument run -- python train.py")
    Settings.from_environment({**os.environ, PREFIX: "1"})
    program = shutil.which(command[0])
    if program is None:
        raise _refusal(
            "a command that can be executed",
            repr(command[0]),
            "Nothing was started.",
            "Check the name and PATH; a Python file needs an interpreter in front: slime-instrument run -- python FILE",
        )
    print(announcement(command), file=sys.stderr)
    missing = advice()
    if missing is not None:
        print(f"slime_instrument: {missing}.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    environment = {**os.environ, PREFIX: "1", ROUTE_VARIABLE: ROUTE}
    try:
        os.execvpe(program, command, environment)
    except OSError as error:
        raise _refusal(
            "a command that can be executed",
            f"{command[0]!r} ({error.strerror})",
            "Nothing was started.",
            "Check the file's first line (#!) and that it is built for this machine.",
        ) from error


def announcement(command: list[str]) -> str:
    """The one line: what runs, and what will be patched in it when slime is imported."""
    from slime_instrument._hooks import HOOKS

    names = ", ".join(patch.name for patch in HOOKS)
    return f"slime_instrument: armed `{shlex.join(command)}`; when it imports slime, these are patched: {names}"


def _refusal(expected: str, found: str, follows: str, next_step: str) -> InstrumentError:
    return InstrumentError(
        five_parts("slime-instrument run", expected=expected, found=found, follows=follows, next_step=next_step)
    )
