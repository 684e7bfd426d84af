"""What ``SLIME_INSTRUMENT`` says. Imports ``os`` alone: this is read at every interpreter start."""

from __future__ import annotations

import os

PREFIX = "SLIME_INSTRUMENT"
ROUTE_VARIABLE = "SLIME_INSTRUMENT_ROUTE"
"""Set by this package itself for child processes: how they are armed, in words."""
ON, OFF = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})


def is_on() -> bool | None:
    """True, False, or None when unset. A value that means neither counts as on, so that arming reaches the check
    that refuses it by name."""
    text = os.environ.get(PREFIX)
    return None if text is None else text.strip().lower() not in OFF
