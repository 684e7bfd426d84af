"""The path of the train dump: what slime's arguments ask for, and whether that can work for the whole run."""

from __future__ import annotations

import os
import string
from pathlib import Path
from typing import Any

from slime_instrument._errors import TrainingPathError, five_parts

__all__ = ["check_template", "check_writable", "dump_path", "dump_template"]

_PLACEHOLDERS = frozenset({"rollout_id", "rank"})
_RANK_SUFFIX = "{rollout_id}_{rank}.pt"


def dump_template(args: Any) -> str:
    """The path template: ``args.save_debug_train_data``, except that ``--dump-details`` of slime before #2266, which
    names one file per rank, becomes one file per rollout under the name that slime uses since."""
    template = str(os.fspath(args.save_debug_train_data))
    details = getattr(args, "dump_details", None)
    if details is not None and template == f"{details}/train_data/{_RANK_SUFFIX}":
        return template[: -len(_RANK_SUFFIX)] + "{rollout_id}.pt"
    return template


def dump_path(template: str, rollout_id: int, rank: int) -> Path:
    return Path(template.format(rollout_id=rollout_id, rank=rank))


def check_template(args: Any) -> str:
    """The template, if it can hold every dump of this run; else :class:`TrainingPathError`."""
    template = dump_template(args)
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        unknown = sorted({name for name in names if name not in _PLACEHOLDERS})
        first, second = (dump_path(template, rollout_id, 0) for rollout_id in (0, 1)) if not unknown else (None, None)
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise _refusal(template, f"a path template that can be filled in ({error})", repr(template)) from None
    if unknown:
        found = ", ".join("{" + name + "}" for name in unknown)
        raise _refusal(template, "only {rollout_id} and {rank} as placeholders", found)
    if first == second and _number_of_rollouts(args) != 1:
        found = "a path without {rollout_id}, for several rollouts"
        raise _refusal(template, "a different file for each rollout", found)
    rollout_template = getattr(args, "save_debug_rollout_data", None)
    if rollout_template is not None and _same_file(rollout_template, template):
        raise _refusal(template, "another path than --save-debug-rollout-data", "the same path for both")
    return template


def check_writable(template: str, rank: int) -> None:
    """Make the folder of the first dump and see that a file can be made there; else :class:`TrainingPathError`."""
    path = dump_path(template, 0, rank)
    probe = path.parent / f".slime_instrument.probe.{os.getpid()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _refusal(
            template, f"a folder {path.parent} in which files can be made", error.strerror or str(error)
        ) from error


def _number_of_rollouts(args: Any) -> int | None:
    total = getattr(args, "num_rollout", None)
    return None if total is None else int(total) - int(getattr(args, "start_rollout_id", None) or 0)


def _same_file(rollout_template: Any, template: str) -> bool:
    try:
        other = Path(os.fspath(rollout_template).format(rollout_id=0))
        return os.path.realpath(other) == os.path.realpath(dump_path(template, 0, 0))
    except (KeyError, IndexError, ValueError, TypeError):
        return False  # slime's own concern; it fails there with slime's message


def _refusal(template: str, expected: str, found: str) -> TrainingPathError:
    return TrainingPathError(
        five_parts(
            f"--save-debug-train-data {template}",
            expected=expected,
            found=found,
            follows="Training is not started, because its dumps would be lost.",
            next_step="Use a path such as dumps/train_data/{rollout_id}.pt.",
        )
    )
