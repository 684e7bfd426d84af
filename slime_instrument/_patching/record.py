"""One patch in one process: its state, what it replaced, how often it was called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slime_instrument._patching.aliases import Alias
from slime_instrument._patching.declaration import Patch, State, Target
from slime_instrument._patching.failures import FailurePolicy

__all__ = ["Record"]


@dataclass
class Record:
    """The living side of a declaration. ``wrapper`` is the handle by which the patch is removed."""

    patch: Patch
    policy: FailurePolicy
    state: State = State.DISABLED
    reason: str = "not armed in this process"
    calls: int = 0
    failures: int = 0
    inert: bool = True
    application: int = 0
    """Counts how often this patch was put on; a wrapper of an earlier time knows by it that it is out of use."""
    bypassed: bool = False
    """Drifted, and as far as can be seen the target no longer runs through ours."""
    on_failed: Callable[[], None] = lambda: None
    """Called when this patch has failed for good."""
    target: Target | None = None
    owner: Any = None
    attribute: str = ""
    inherited: bool = False
    """The attribute came from a base class: removing means deleting ours, not assigning the original."""
    original: Any = None
    wrapper: Any = None
    positions: dict[str, int] = field(default_factory=dict)
    aliases: list[Alias] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Alternative targets that were looked at and do not fit -> why."""

    def become(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        held = state is State.FAILED and self.patch.hold
        self.inert = state not in (State.ACTIVE, State.DRIFTED) and not held

    def failed(self, error: BaseException, *, may_raise: bool = True) -> None:
        """A step of ours failed inside a call. Raises in strict mode; steps out when it keeps failing."""
        self.failures += 1
        try:
            if self.policy.report(self.patch.name, error, self.patch.lost, may_raise=may_raise):
                self.become(State.FAILED, f"failed {self.failures} times, last: {type(error).__name__}: {error}")
                self.on_failed()
        finally:
            del error  # see FailurePolicy.report

    def as_dict(self) -> dict[str, Any]:
        """``target``, ``state``, ``reason``, ``calls``, and the patch's ``name``, ``group`` and ``failures``."""
        return {
            "name": self.patch.name,
            "group": self.patch.group,
            "target": str(self.target or self.patch.targets[0]),
            "state": str(self.state),
            "reason": self.reason,
            "calls": self.calls,
            "failures": self.failures,
        }
