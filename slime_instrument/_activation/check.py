"""Look at a slime without importing or training it: its version, whether it dumps by itself, which patches fit."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_instrument._errors import InstrumentError, five_parts
from slime_instrument._hooks import HOOKS
from slime_instrument._hooks.capture import NATIVE_CAPTURE
from slime_instrument._installation import checkout_version, installed
from slime_instrument._patching.fit import look_up, probe, read_module
from slime_instrument._patching.patch import PatchStatus, State
from slime_instrument._switch import PACKAGE_VARIABLE, package

__all__ = ["CheckResult", "check", "find_slime"]

_LOSS = "backends.megatron_utils.loss"
_NATIVE_DUMP = re.compile(rb"^def save_debug_train_data\b", re.MULTILINE), b"dp_shards"


@dataclass(frozen=True)
class CheckResult:
    """``path`` is the folder that holds the ``slime`` package. ``native_dump``: slime writes v2 dumps itself.
    ``verdict``: in one sentence, whether each rollout will have a v2 train dump, and who captures its log-probs."""

    path: Path
    version: str | None
    native_dump: bool
    dumps_written: bool
    verdict: str
    patches: tuple[PatchStatus, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "dumps_written": self.dumps_written,
            "slime": {"version": self.version, "native_dump": self.native_dump, "path": str(self.path)},
            "patches": [patch.as_dict() for patch in self.patches],
        }


def check(slime: Path | None = None) -> CheckResult:
    """Probe the checkout ``slime``, else the one in ``$SLIME_SOURCE``, else the one slime that Python would import.

    Raises :class:`InstrumentError` when there is none, more than one, or one that cannot be read.
    """
    named = os.environ.get("SLIME_SOURCE")
    root = _checkout(slime or Path(str(named))) if slime or named else find_slime()
    try:
        loss = read_module(root, f"{package()}.{_LOSS}")
        patches = tuple(probe(HOOKS, root))
        native_dump = _dumps_itself(root)
        captures = look_up(root, NATIVE_CAPTURE) is not None
    except (SyntaxError, OSError, ValueError) as error:
        raise _refusal(str(root), "a slime that can be read", f"{error}", "Check out slime again.") from error
    if loss is None:
        raise _refusal(
            str(root),
            "slime's Megatron backend",
            f"no {package()}.{_LOSS} below it",
            "Give the folder that holds the slime package, or a complete checkout.",
        )
    version = checkout_version(root) or installed(package())
    written, verdict = _verdict(patches, native_dump, captures)
    return CheckResult(root, version, native_dump, written, verdict, patches)


def _dumps_itself(root: Path) -> bool:
    """Whether slime's own dump function, wherever it is, writes v2 files."""
    defined, mark = _NATIVE_DUMP
    texts = (path.read_bytes() for path in sorted((root / package()).rglob("*.py")))
    return any(mark in text and defined.search(text) for text in texts)


def _verdict(patches: Sequence[PatchStatus], native_dump: bool, captures: bool) -> tuple[bool, str]:
    needed = [patch for patch in patches if patch.name not in {hook.name for hook in HOOKS if hook.optional}]
    broken = {patch.group: patch.lacks for patch in needed if patch.lacks is not None}
    broken |= {patch.group: patch.name for patch in needed if patch.state == State.INCOMPATIBLE}
    if "dump" in broken:
        if native_dump:
            return True, f"Train dumps will be written by slime itself: {broken['dump']} does not fit here."
        return False, f"No v2 train dump will be written: {broken['dump']} does not fit; slime's per-rank files remain."
    if captures:
        who = "slime captures the log-probs"
    elif "capture" in broken:
        who = f"without log-probs where slime computes none, because {broken['capture']} does not fit"
    else:
        who = "slime_instrument captures the log-probs"
    order = "; in the order of sample_index" if "positions" in broken else ""
    return True, f"Train dumps will be written; {who}{order}."


def find_slime() -> Path:
    """The folder of the only slime on Python's path."""
    spec = importlib.util.find_spec(package())
    places = [Path(entry or ".") for entry in sys.path]
    roots = [Path(location).parent for location in (spec.submodule_search_locations or ())] if spec is not None else []
    roots += [place for place in places if (place / package() / "backends").is_dir()]
    found = list(dict.fromkeys(root.resolve() for root in roots if (root / package() / "backends").is_dir()))
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
        if (root / package() / "backends").is_dir() and (root == folder or folder.name == package()):
            return root.resolve()
    found = "no such folder" if not folder.is_dir() else f"no {package()} package in it"
    next_step = f"Give the folder that holds the {package()} package."
    forks = sorted(path.parents[1].name for path in folder.glob("*/backends/megatron_utils"))
    if forks:
        found, next_step = f"{found}, but {forks[0]}", f"If that is a fork of slime, set {PACKAGE_VARIABLE}={forks[0]}."
    raise _refusal(str(folder), "a checkout of slime", found, next_step)


def _refusal(subject: str, expected: str, found: str, next_step: str) -> InstrumentError:
    return InstrumentError(
        five_parts(subject, expected=expected, found=found, follows="Nothing was probed.", next_step=next_step)
    )
