"""What ``SLIME_INSTRUMENT`` says, which package is slime, and waiting for its first import with nothing loaded until
then. Imports ``os`` and ``sys`` alone: this is read at every interpreter start."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # the typing module alone costs more than everything here
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

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


class SlimeWatch:
    """A finder on ``sys.meta_path`` that finds nothing; the first question about slime calls ``arm(route)``.

    Afterwards it stays there, and does nothing: imports of this and of other threads are walking the list, and would
    miss the finder behind one that is taken out.
    """

    def __init__(self, route: str, arm: Callable[[str], None]) -> None:
        self.route = route
        self._top = package()
        self._arm: Callable[[str], None] | None = arm

    @property
    def waits(self) -> bool:
        return self._arm is not None

    def stop(self) -> Callable[[str], None] | None:
        """Do nothing from now on; returns what was to be called."""
        arm, self._arm = self._arm, None
        return arm

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == self._top or fullname.startswith(self._top + "."):
            arm = self.stop()
            if arm is not None:
                arm(self.route)
        return None


def watch() -> SlimeWatch | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, SlimeWatch) and finder.waits), None)


def is_waiting() -> bool:
    return watch() is not None


def route() -> str | None:
    """How this process will be armed, while it waits for slime."""
    found = watch()
    return None if found is None else found.route


def cancel() -> None:
    """Wait no longer."""
    for finder in sys.meta_path:
        if isinstance(finder, SlimeWatch):
            finder.stop()


def wait_or_arm(how: str, arm: Callable[[str], None]) -> None:
    """Arm at the first import of slime, or now if that has been."""
    if is_waiting():
        return
    if package() in sys.modules:
        arm(how)
    else:
        sys.meta_path.insert(0, SlimeWatch(how, arm))
