"""``instrument.jsonl``: what a run says of its own dumps, one JSON object a line, beside them.

Only the writer's rank appends, each line by one write, so that the file can be read while the job runs. It outlives the
log, and rotation leaves it alone. Standard library only.

========== ==========================================================================================================
event      says
========== ==========================================================================================================
start      a process began to train: versions, layout, arming route, settings, patches, process
written    a rollout's dump is in place: path, bytes, seconds that training was blocked
pending    its file is being written in the background; followed by "written" or "lost"
lost       a rollout has no dump, and why
left-out   a field, or the part of some ranks, is not in a rollout's dump, and why
waiting    what a dump waits for, said after ten seconds and then ever less often
removed    rotation removed a dump
stepped-out  this process dumps no more, and why
note       anything else worth knowing, such as what the file system of the dumps cannot do
========== ==========================================================================================================
"""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAME = "instrument.jsonl"


class Writer:
    """Appends to the journal of one folder. What the disk refuses is kept, and comes before the next line: a rollout
    that was lost because the disk was full is named once there is room again."""

    _MOST_KEPT = 1000

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._kept: list[str] = []
        # A file that is written in the background has a line, too; and a signal handler may come in between.
        self._lock = threading.RLock()

    def append(self, event: str, **values: Any) -> None:
        """Append one line, and those that could not be before. Raises OSError."""
        line = {"event": event, "time": round(time.time(), 3), **values}
        text = json.dumps(line, default=str) + "\n"
        with self._lock:
            lines = [*self._kept, text]
            self._kept = lines[-self._MOST_KEPT :]
            self._folder.mkdir(parents=True, exist_ok=True)
            _append(self._folder / NAME, lines)
            self._kept = []


def _append(file: Path, lines: Sequence[str]) -> None:
    """All of ``lines`` by one write. Never waits: a pipe that nobody reads is an error, as is a line that was cut."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(file, flags, 0o666)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISFIFO(status.st_mode):
            raise OSError(errno.EINVAL, "is a pipe", str(file))
        data = "".join(lines).encode()
        if stat.S_ISREG(status.st_mode) and status.st_size and os.pread(descriptor, 1, status.st_size - 1) != b"\n":
            data = b"\n" + data  # the line before was cut; it alone is lost
        written = os.write(descriptor, data)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
    finally:
        os.close(descriptor)


def process() -> dict[str, Any]:
    """What identifies this process: host, process id, and when it started."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "pid_started": _started(os.getpid())}


@dataclass(frozen=True)
class RolloutEntry:
    """What became of one dump call.

    Attributes:
        rollout_id: the rollout.
        state: "written", "pending", "lost", or "removed" by rotation.
        path: of the file; "" where it was not known.
        reason: why it was lost; "" otherwise.
        size: bytes of the file; 0 where there is none.
        blocked_s: seconds that the dump kept the writer's rank from training; None where it is not known.
        left_out: fields that the file lacks, and why.
        time: seconds since the epoch.
    """

    rollout_id: int
    state: str
    path: str = ""
    reason: str = ""
    size: int = 0
    blocked_s: float | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    time: float = 0.0


@dataclass(frozen=True)
class Journal:
    """A run's journal as it is now.

    Attributes:
        path: the file.
        starts: the "start" lines, oldest first; a restarted job has several.
        rollouts: one entry for each dump call, in order.
        waiting: what the newest dump waits for, if it does; "" otherwise.
        stepped_out: why the process dumps no more; "" where it does.
        running: whether the process that wrote last is alive; None where this machine cannot tell.
        problems: lines that could not be read.
    """

    path: str
    starts: Sequence[Mapping[str, Any]]
    rollouts: Sequence[RolloutEntry]
    waiting: str
    stepped_out: str
    notes: Sequence[str]
    running: bool | None
    problems: Sequence[str]

    @property
    def healthy(self) -> bool:
        """Whether nothing was lost, as far as the journal says."""
        lost = any(one.state == "lost" or one.left_out for one in self.rollouts)
        ended_pending = self.running is False and any(one.state == "pending" for one in self.rollouts)
        return not (lost or ended_pending or self.stepped_out or self.problems)

    def as_dict(self) -> dict[str, Any]:
        return {
            "journal": self.path,
            "running": self.running,
            "healthy": self.healthy,
            "starts": [dict(start) for start in self.starts],
            "rollouts": [{**vars(one), "left_out": dict(one.left_out)} for one in self.rollouts],
            "waiting": self.waiting,
            "stepped_out": self.stepped_out,
            "notes": list(self.notes),
            "problems": list(self.problems),
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        alive = {True: "is running", False: "has ended", None: "cannot be seen from this machine"}[self.running]
        lines = []
        if self.starts:
            last = self.starts[-1]
            versions = last.get("versions") or {}
            lines.append(
                f"process {last.get('pid')} on {last.get('host')} {alive}; slime {versions.get('slime')}, "
                f"slime_instrument {versions.get('slime_instrument')}; armed by {last.get('route')}"
            )
            layout = last.get("layout") or {}
            lines.append("layout: " + ", ".join(f"{name} {size}" for name, size in layout.items()))
            off = [p for p in last.get("patches") or () if p.get("state") not in ("ACTIVE", "SKIPPED", "PENDING")]
            lines += [f"patch {patch.get('name')} is {patch.get('state')}: {patch.get('reason')}" for patch in off]
            if len(self.starts) > 1:
                lines.append(f"started {len(self.starts)} times")
        lines += [f"note: {note}" for note in self.notes]
        counts = {state: sum(one.state == state for one in self.rollouts) for state in _STATES}
        shown = ", ".join(f"{count} {state}" for state, count in counts.items() if count) or "no dump yet"
        blocked = sum(one.blocked_s or 0.0 for one in self.rollouts)
        lines.append(f"dumps: {shown}; training was blocked for {blocked:.1f} s in all")
        for one in self.rollouts:
            if one.state == "lost":
                lines.append(f"rollout {one.rollout_id} has no dump: {one.reason}")
            if one.state == "pending":
                what = "was being written when the process ended" if self.running is False else "is being written"
                lines.append(f"rollout {one.rollout_id} {what}: {one.path}")
            lines += [f"rollout {one.rollout_id} lacks {name}: {why}" for name, why in one.left_out.items()]
        if self.waiting:
            lines.append(f"now {self.waiting}" if self.running is not False else f"when it ended: {self.waiting}")
        if self.stepped_out:
            lines.append(f"this run dumps no more: {self.stepped_out}")
        lines += list(self.problems)
        return lines


_STATES = ("written", "pending", "lost", "removed")


def read_journal(path: Path) -> Journal:
    """Read ``path``: an ``instrument.jsonl``, its folder, or a ``--dump-details`` folder.

    Raises OSError where there is none. Lines that are cut or odd are named in ``problems``; the others count.
    """
    file = next((one for one in (path / NAME, path / "train_data" / NAME) if one.is_file()), path)
    if file.is_dir():
        raise FileNotFoundError(errno.ENOENT, f"holds no {NAME}, nor does a train_data folder in it", str(path))
    if file.is_file() and file.suffix != Path(NAME).suffix:
        raise FileNotFoundError(errno.ENOENT, f"is no {NAME}", str(path))
    starts: list[dict[str, Any]] = []
    rollouts: list[RolloutEntry] = []
    notes: list[str] = []
    waiting, stepped_out = "", ""
    problems = []
    for number, text in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not text:
            continue  # a writer saw half of another's line, and took it for one that was cut
        try:
            line = json.loads(text)
            event = line["event"]
            if event == "start":
                starts.append(line)
                stepped_out = ""
            elif event == "waiting":
                waiting = str(line["what"])
                continue
            elif event == "stepped-out":
                stepped_out = str(line["reason"])
            elif event == "note":
                notes.append(str(line["text"]))
            elif event in ("written", "pending", "lost", "removed", "left-out"):
                _take(rollouts, event, line)
            waiting = ""
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            problems.append(f"line {number} cannot be read ({type(error).__name__})")
    running = _is_running(starts[-1]) if starts else None
    return Journal(str(file), starts, rollouts, waiting, stepped_out, notes, running, problems)


def _take(rollouts: list[RolloutEntry], event: str, line: Mapping[str, Any]) -> None:
    rollout_id, path = int(line["rollout_id"]), str(line.get("path") or "")
    earlier = [i for i, one in enumerate(rollouts) if (one.rollout_id, one.path) == (rollout_id, path)]
    if event == "left-out":
        known = rollouts[earlier[-1]] if earlier else None
        if known is not None:
            added = {**known.left_out, str(line["field"]): str(line["reason"])}
            rollouts[earlier[-1]] = RolloutEntry(**{**vars(known), "left_out": added})
        return
    entry = RolloutEntry(
        rollout_id,
        event,
        path,
        str(line.get("reason") or ""),
        int(line.get("bytes") or 0),
        line.get("blocked_s"),
        {},
        float(line.get("time") or 0.0),
    )
    if earlier and (rollouts[earlier[-1]].state == "pending" or event == "removed"):
        before = rollouts[earlier[-1]]
        blocked = entry.blocked_s if entry.blocked_s is not None else before.blocked_s
        rollouts[earlier[-1]] = RolloutEntry(
            **{**vars(entry), "blocked_s": blocked, "left_out": before.left_out, "size": entry.size or before.size}
        )
    else:
        rollouts.append(entry)


def _is_running(start: Mapping[str, Any]) -> bool | None:
    if start.get("host") != socket.gethostname():
        return None
    pid = start.get("pid")
    return isinstance(pid, int) and _started(pid) is not None and _started(pid) == start.get("pid_started")


def _started(pid: int) -> int | None:
    """When a process of this machine started, in clock ticks since boot; None where there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(stat.rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
