"""One patch in one process: its state, what it replaced, how often it was called; and the snapshot that users see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from slime_instrument._errors import describe
from slime_instrument._patching.failures import FailurePolicy
from slime_instrument._patching.patch import Patch, State, Target

Alias = tuple[dict[str, Any], str]
"""A module's namespace and the name in it."""


@dataclass
class Placement:
    """The living side of a declaration. ``wrapper`` is the handle by which the patch is removed."""

    patch: Patch
    policy: FailurePolicy
    process: Any = None
    """Handed to the hook with each call."""
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
    misfits: dict[str, str] = field(default_factory=dict)
    """Alternative targets that were looked at and do not fit -> why."""

    def set_state(self, state: State, reason: str) -> None:
        self.state, self.reason = state, reason
        # What took the target's place keeps it after it failed for good; see instead().
        in_place = self.patch.instead is not None and state is State.FAILED
        self.inert = state not in (State.ACTIVE, State.DRIFTED) and not in_place

    def failed(self, error: BaseException, *, may_raise: bool = True) -> None:
        """A step of ours failed inside a call. Raises in strict mode; steps out when it keeps failing."""
        self.failures += 1
        try:
            if self.policy.report(self.patch.name, error, self.patch.on_failure, may_raise=may_raise):
                self.fail_for_good(f"failed {self.failures} times, last: {describe(error)}")
        finally:
            del error  # see FailurePolicy.report

    def fail_for_good(self, reason: str) -> None:
        self.set_state(State.FAILED, reason)
        self.on_failed()

    def snapshot(self, remark: str = "") -> PatchStatus:
        reason = f"{self.reason}; {remark}" if remark else self.reason
        target = str(self.target or self.patch.targets[0])
        return PatchStatus(
            self.patch.name, self.patch.group, target, str(self.state), reason, self.calls, self.failures
        )


@dataclass(frozen=True)
class PatchStatus:
    """A snapshot of one patch. ``calls`` counts calls of the target since arming."""

    name: str
    group: str
    target: str
    state: str
    reason: str
    calls: int
    failures: int

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Status:
    """Whether and how this process is armed, with what settings, and each patch. ``str()`` is a table."""

    armed: bool
    route: str
    settings: dict[str, Any]
    patches: tuple[PatchStatus, ...]
    failure: str | None = None

    def __iter__(self) -> Iterator[PatchStatus]:
        return iter(self.patches)

    def __getitem__(self, name: str) -> PatchStatus:
        return next(patch for patch in self.patches if patch.name == name)

    def as_dict(self) -> dict[str, Any]:
        return {
            "armed": self.armed,
            "route": self.route,
            "settings": self.settings,
            "failure": self.failure,
            "patches": [patch.as_dict() for patch in self.patches],
        }

    def __str__(self) -> str:
        head = f"armed by {self.route}" if self.armed else "not armed"
        if self.failure:
            head += f"; {self.failure}"
        rows = [("state", "calls", "target", "reason")]
        rows += [(patch.state, str(patch.calls), patch.target, patch.reason) for patch in self.patches]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]) for row in rows]  # noqa: B905  # reason is unpadded
        return "\n".join([f"slime_instrument is {head}", *lines])
