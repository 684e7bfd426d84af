"""What a patch is: where it applies, what it relies on, what it does around a call. Data only."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["KEYWORD_ONLY", "Advice", "Call", "Patch", "State", "Target"]

KEYWORD_ONLY = -1
"""In place of a parameter's position: it is never among the positional arguments."""


class State(str, enum.Enum):
    """Where a patch stands. Each state comes with a reason in words."""

    DISABLED = "DISABLED"  # not armed in this process
    PENDING = "PENDING"  # armed, the target's module is not imported yet
    ACTIVE = "ACTIVE"  # the target is wrapped
    INCOMPATIBLE = "INCOMPATIBLE"  # the target is not there or has another signature
    FAILED = "FAILED"  # failed repeatedly and stepped out for the rest of the process
    SKIPPED = "SKIPPED"  # not needed here, or stepped back together with another patch
    DRIFTED = "DRIFTED"  # somebody replaced or wrapped the target after us
    REMOVED = "REMOVED"  # taken back by uninstrument()

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Target:
    """One place where the attribute may live: an importable module and a dotted path in it."""

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


@dataclass(slots=True)  # not frozen: one is made in every wrapped call, and freezing doubles what that costs
class Call:
    """One call of a target, with its arguments by the target's own parameter names. Nobody changes it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    positions: dict[str, int]
    """Parameter name -> index among the positional arguments, read from the target's signature."""

    def __getitem__(self, name: str) -> Any:
        """The argument as it was passed; KeyError when this call leaves it to its default."""
        if name in self.kwargs:
            return self.kwargs[name]
        index = self.positions.get(name, KEYWORD_ONLY)
        if not 0 <= index < len(self.args):
            raise KeyError(name)
        return self.args[index]

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default

    def replaced(self, name: str, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with one of them exchanged; the call itself stays as it is."""
        index = self.positions.get(name, KEYWORD_ONLY)
        if name in self.kwargs or not 0 <= index < len(self.args):
            return self.args, {**self.kwargs, name: value}
        return (*self.args[:index], value, *self.args[index + 1 :]), self.kwargs


@dataclass(frozen=True)
class Advice:
    """What to do about one call. Whatever is left out does not happen.

    ``arguments``: call the target with these instead. ``after``: gets the result, returns the result to hand on; not
    run when the target raised. ``cleanup``: runs after the target whatever happened. ``instead``: called in place of
    the target.
    """

    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    after: Callable[[Any], Any] | None = None
    cleanup: Callable[[], None] | None = None
    instead: Callable[[], Any] | None = None


@dataclass(frozen=True)
class Patch:
    """A declaration: ``name``, alternatives of ``targets`` (the first that exists wins), the parameters it relies on.

    ``before`` is asked at each call and returns an :class:`Advice`, or None to leave the call alone. ``idle`` is a
    cheap question asked first: True means that nothing is to be done, so that the call costs next to nothing.
    ``replace`` is for targets that are no functions: it gets the original and returns a stand-in. ``group`` names what
    applies together or not at all; ``needs`` names groups without which this one steps back; ``optional`` patches may
    lack their target without the group stepping back.
    """

    name: str
    targets: tuple[Target, ...]
    group: str
    relies_on: tuple[str, ...] = ()
    before: Callable[[Call], Advice | None] | None = None
    idle: Callable[[], bool] | None = None
    replace: Callable[[Any], Any] | None = None
    needs: tuple[str, ...] = ()
    optional: bool = False
    lost: str = "What it adds is lost for this call."
    """What a failure of this patch costs, for the log."""
    rescue: Callable[[Call], Advice | None] | None = None
    """Asked when ``before`` failed, where a call left alone would do harm."""
    hold: bool = False
    """Once this patch has failed for good, its target stays uncalled, instead of running as if we were not there."""
    unneeded: Callable[[Any], str | None] = field(default=lambda _module: None)
    """Asked with the imported module: a reason why the patch is not needed there, or None."""

    def __post_init__(self) -> None:
        if not self.targets or (self.before is None) == (self.replace is None):
            raise TypeError(f"patch {self.name!r} needs targets, and either before or replace")
