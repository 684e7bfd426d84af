"""Which rollouts are dumped, and which dumps of this run are removed again."""

from __future__ import annotations

import logging
from pathlib import Path

from slime_instrument._settings import Settings

__all__ = ["Rotation", "is_due"]

logger = logging.getLogger("slime_instrument")


def is_due(settings: Settings, rollout_id: int) -> bool:
    """Every ``EVERY``-th rollout, counted by its id, and every pinned one."""
    return rollout_id % settings.every == 0 or rollout_id in settings.pin


class Rotation:
    """Keeps the last ``KEEP_LAST`` dumps that this process wrote, and all pinned ones. Removes nothing else."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._written: dict[int, Path] = {}
        self._as_written: dict[Path, tuple[int, int] | None] = {}

    def wrote(self, rollout_id: int, path: Path) -> list[Path]:
        """Note a new dump and remove those that are now too old; returns the removed paths."""
        self._written.pop(rollout_id, None)
        if rollout_id not in self._settings.pin:
            self._written[rollout_id] = path
            self._as_written[path] = _identity(path)
        keep = self._settings.keep_last
        removed = []
        while keep is not None and len(self._written) > keep:
            oldest = next(iter(self._written))
            old_path = self._written.pop(oldest)
            if old_path not in self._written.values():
                if self._as_written.pop(old_path) != _identity(old_path):
                    continue  # gone, or replaced by somebody's own file
                try:
                    old_path.unlink()
                except OSError as error:  # somebody else's doing; the new dump is written all the same
                    logger.warning("slime_instrument: rotation could not remove %s: %s", old_path, error.strerror)
                else:
                    removed.append(old_path)
        return removed


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file is at ``path``, and in which version; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
