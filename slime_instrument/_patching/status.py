"""What ``status()`` returns: one record per patch, readable by people and by programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["PatchStatus", "Status"]


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
