"""The verdicts so far, one JSON file that several slices of the matrix may write at once."""

from __future__ import annotations

import fcntl
import json
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tools.matrix.checks import Verdict
from tools.matrix.plan import Cell


class Results:
    """Verdicts by cell key, each with when it was given and for which code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, dict[str, Any]]:
        try:
            found: dict[str, dict[str, Any]] = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}
        return found

    def add(self, verdicts: dict[Cell, Verdict], code: str) -> None:
        """Put ``verdicts`` among those of others; the file is never seen half written."""
        stamp = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            everything = self.read()
            for cell, verdict in verdicts.items():
                everything[cell.key] = {**asdict(verdict), "when": stamp, "code": code}
            part = self.path.with_suffix(".part")
            part.write_text(json.dumps(everything, indent=1, sort_keys=True))
            part.replace(self.path)
