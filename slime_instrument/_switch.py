"""What ``SLIME_INSTRUMENT`` says, and which package is slime. Imports ``os`` alone: this is read at every interpreter
start."""

from __future__ import annotations

import os

PREFIX = "SLIME_INSTRUMENT"
ROUTE_VARIABLE = "SLIME_INSTRUMENT_ROUTE"
"""Set by this package itself for child processes: how they are armed, in words."""
ON, OFF = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})


PACKAGE_VARIABLE = "SLIME_INSTRUMENT_PACKAGE"


def package() -> str:
    """The name of the package that is slime here: a fork may have another. A name that none can have is refused with
    the other settings."""
    name = os.environ.get(PACKAGE_VARIABLE, "").strip()
    return name if name.isidentifier() else "slime"


def is_on() -> bool | None:
    """True, False, or None when unset. A value that means neither counts as on, so that arming reaches the check
    that refuses it by name."""
    text = os.environ.get(PREFIX)
    return None if text is None else text.strip().lower() not in OFF
