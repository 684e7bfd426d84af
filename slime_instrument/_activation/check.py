"""Look at a slime without importing or training it: its version, whether it dumps by itself, which patches fit."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_instrument._errors import InstrumentError, five_parts
from slime_instrument._hooks import HOOKS
from slime_instrument._patching.fit import probe, read_module
from slime_instrument._patching.placement import PatchStatus
from slime_instrument._versions import checkout_version, installed

__all__ = ["CheckResult", "check", "find_slime"]

_LOSS = "slime.backends.megatron_utils.loss"


@dataclass(frozen=True)
class CheckResult:
    """``path`` is the folder that holds the ``slime`` package. ``native_dump``: slime writes v2 dumps itself."""

    path: Path
    version: str | None
    native_dump: bool
    patches: tuple[PatchStatus, ...]

    @property
    def applicable(self) -> bool:
        """Whether every patch that must fit does."""
        optional = {patch.name for patch in HOOKS if patch.optional}
        return all(patch.state != "INCOMPATIBLE" or patch.name in optional for patch in self.patches)

    def as_dict(self) -> dict[str, Any]:
        return {
            "slime": {"version": self.version, "native_dump": self.native_dump, "path": str(self.path)},
            "applicable": self.applicable,
            "patches": [patch.as_dict() for patch in self.patches],
        }


def check(slime: Path | None = None) -> CheckResult:
    """Probe the checkout ``slime``, or the one slime that Python would import. Raises :class:`InstrumentError` when
    there is none, more than one, or one that cannot be read."""
    root = find_slime() if slime is None else _checkout(slime)
    try:
        loss = read_module(root, _LOSS)
        patches = tuple(probe(HOOKS, root))
    except (SyntaxError, OSError, ValueError) as error:
        raise _refusal(str(root), "a slime that can be read", f"{error}", "Check out slime again.") from error
    if loss is None:
        raise _refusal(
            str(root),
            "slime's Megatron backend",
            f"no {_LOSS} below it",
            "Give the folder that holds the slime package, or a complete checkout.",
        )
    version = checkout_version(root) or installed("slime")
    return CheckResult(root, version, hasattr(loss, "enable_log_prob_capture"), patches)


def find_slime() -> Path:
    """The folder of the only slime on Python's path."""
    spec = importlib.util.find_spec("slime")
    places = [Path(entry or ".") for entry in sys.path]
    roots = [Path(location).parent for location in (spec.submodule_search_locations or ())] if spec is not None else []
    roots += [place for place in places if (place / "slime" / "backends").is_dir()]
    found = list(dict.fromkeys(root.resolve() for root in roots if (root / "slime" / "backends").is_dir()))
    if not found:
        raise _refusal("slime", "an installed slime", "none on Python's path", "Give one with --slime DIR.")
    if len(found) > 1:
        raise _refusal(
            "slime",
            "one slime on Python's path",
            " and ".join(str(root) for root in found),
            "Remove one, or say which with --slime DIR.",
        )
    return found[0]


def _checkout(folder: Path) -> Path:
    for root in (folder, folder.parent):
        if (root / "slime" / "backends").is_dir() and (root == folder or folder.name == "slime"):
            return root.resolve()
    found = "no such folder" if not folder.is_dir() else "no slime package in it"
    raise _refusal(str(folder), "a checkout of slime", found, "Give the folder that holds the slime package.")


def _refusal(subject: str, expected: str, found: str, next_step: str) -> InstrumentError:
    return InstrumentError(
        five_parts(subject, expected=expected, found=found, follows="Nothing was probed.", next_step=next_step)
    )
