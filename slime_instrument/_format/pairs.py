"""Which files belong together: dumps found in folders, told apart, and paired by rollout.

Nothing large is loaded for it. What a file is and which rollout it is of mostly stand in its first bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_instrument._errors import DumpFormatError, five_parts
from slime_instrument._format.containers import Container, examine
from slime_instrument._format.dumps import detect_kind, is_eval_name, rollout_id_of
from slime_instrument._format.safe_load import load_dump
from slime_instrument._format.schema import DumpKind

SUFFIXES = (".pt", ".pkl")
FOLDERS = ("rollout_data", "train_data")
"""Folders in which ``--dump-details`` puts the dumps of both sides."""


@dataclass(frozen=True)
class DumpFile:
    """One dump, not loaded.

    Attributes:
        path: the file.
        kind: what it is.
        rollout_id: as :func:`~slime_instrument._format.dumps.rollout_id_of` finds it.
    """

    path: Path
    kind: DumpKind
    rollout_id: int | None


@dataclass(frozen=True)
class Skipped:
    """A file that was not used, and why.

    Attributes:
        file: the file.
        reason: one sentence without a full stop.
        unreadable: whether it could not be read at all; the others belong to no pair.
        lone: what it is, where it is a good dump of which the other side is missing.
    """

    file: Path
    reason: str
    unreadable: bool = False
    lone: DumpFile | None = None

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}"

    def as_dict(self) -> dict[str, str]:
        return {"file": str(self.file), "reason": self.reason}


@dataclass(frozen=True)
class FilePair:
    """The dumps of one rollout. ``train``: one v2 file, or all old per-rank files."""

    rollout_id: int | None
    rollout: Path
    train: tuple[Path, ...]

    @property
    def name(self) -> str:
        """For messages."""
        return f"rollout {self.rollout_id}" if self.rollout_id is not None else self.rollout.name

    def as_dict(self) -> dict[str, object]:
        train = str(self.train[0]) if len(self.train) == 1 else [str(path) for path in self.train]
        return {"rollout": str(self.rollout), "train": train}


@dataclass(frozen=True)
class Pairing:
    """Pairs in the order of their rollout ids, and what is left over."""

    pairs: tuple[FilePair, ...]
    skipped: tuple[Skipped, ...]

    @property
    def unreadable(self) -> tuple[Skipped, ...]:
        """Files that could not be read."""
        return tuple(one for one in self.skipped if one.unreadable)


def dump_files(given: Sequence[Path]) -> list[Path]:
    """The dump files among files and folders, each once: files as they are, there or not; of a folder
    ``rollout_data/`` and ``train_data/`` where it has them, else what is in it and in its folders (one per rollout).
    """
    files: dict[Path, None] = {}
    for path in given:
        if not path.is_dir():
            files[path] = None
            continue
        inside = [path / name for name in FOLDERS if (path / name).is_dir()]
        for folder in inside or [path]:
            found = [one for one in (*folder.iterdir(), *folder.glob("*/*")) if one.suffix in SUFFIXES]
            files.update(dict.fromkeys(sorted(one for one in found if one.is_file() and not one.name.startswith("."))))
    return list(files)


def identify(path: Path, *, allow_pickle: bool = False) -> DumpFile:
    """What a file is, read from its first bytes where they tell, else by loading it.

    Raises:
        DumpFormatError: no dump, or not safe to read.
        OSError: the file is missing or may not be read.
    """
    container = examine(path)
    keys = _first_keys(container)
    if "rollout_id" in keys and ("samples" in keys or "format_version" in keys):
        kind: DumpKind = "rollout"
        if "format_version" in keys:
            kind = "train-v2"
        elif is_eval_name(path):
            kind = "rollout-eval"
        if "format_version" not in keys and "rank" in keys:
            kind = "train-rank"
        return DumpFile(path, kind, rollout_id_of(path, keys))
    payload = load_dump(path, allow_pickle=allow_pickle, compact=True)
    return DumpFile(path, detect_kind(path, payload), rollout_id_of(path, payload))


def find_pairs(given: Sequence[Path], *, allow_pickle: bool = False) -> Pairing:
    """Sort dumps into pairs of one rollout each.

    One rollout dump and the train dump of one rollout, given as files, are a pair whatever their ids: somebody put them
    side by side, and the comparison says that the ids differ.

    Args:
        given: dump files, folders of them, folders as ``--dump-details`` writes them, in any order.
        allow_pickle: read rollout dumps with objects of arbitrary classes; this can run code from them.
    """
    skipped: list[Skipped] = []
    rollouts: dict[int | None, list[DumpFile]] = {}
    trains: dict[int | None, list[DumpFile]] = {}
    for path in dump_files(given):
        try:
            file = identify(path, allow_pickle=allow_pickle)
        except (DumpFormatError, OSError) as error:
            skipped.append(Skipped(path, _reason(path, error), unreadable=True))
            continue
        if file.kind == "rollout-eval":
            skipped.append(Skipped(path, "dump of an evaluation; no training belongs to it"))
        else:
            (rollouts if file.kind == "rollout" else trains).setdefault(file.rollout_id, []).append(file)
    if len(rollouts) == len(trains) == 1 and not rollouts.keys() & trains.keys() and not any(p.is_dir() for p in given):
        rollouts = dict.fromkeys(trains, next(iter(rollouts.values())))
    pairs: list[FilePair] = []
    for rollout_id in sorted({*rollouts, *trains}, key=lambda one: (one is None, one or 0)):
        name = f"rollout {rollout_id}" if rollout_id is not None else "an unknown rollout"
        sources, trained = rollouts.get(rollout_id, []), trains.get(rollout_id, [])
        if not sources or not trained:
            lacking = "train" if sources else "rollout"
            reason = f"no {lacking} dump of {name} beside it"
            skipped += [Skipped(file.path, reason, lone=file) for file in sources + trained]
            continue
        reason = f"second dump of {name}; {sources[0].path} was used"
        skipped += [Skipped(file.path, reason) for file in sources[1:]]
        whole = [file for file in trained if file.kind == "train-v2"]
        used = whole[:1] or trained
        reason = f"second dump of {name}; {used[0].path} was used"
        skipped += [Skipped(file.path, reason) for file in trained if file not in used]
        pairs.append(FilePair(rollout_id, sources[0].path, tuple(sorted(file.path for file in used))))
    return Pairing(tuple(pairs), tuple(skipped))


def no_pairs(given: Sequence[Path], pairing: Pairing, follows: str) -> DumpFormatError:
    """The error of a command that found nothing to compare, with what it found instead; the caller raises it."""
    lone = [one.lone for one in pairing.skipped if one.lone is not None]
    sides = {
        side: sorted({str(one.rollout_id) for one in lone if (one.kind == "rollout") == (side == "rollout")})
        for side in ("rollout", "train")
    }
    if not pairing.skipped:
        found = "no dump files" if len(given) == 1 else "no dump files in any of them"
    elif not lone:
        found = "; ".join(map(str, pairing.skipped[:3]))
    else:
        found = " and ".join(
            f"{side} dumps of rollout {', '.join(ids)}" if ids else f"no {side} dump" for side, ids in sides.items()
        )
        if pairing.unreadable:
            found += f"; files that cannot be read: {len(pairing.unreadable)}, such as {pairing.unreadable[0]}"
    return DumpFormatError(
        five_parts(
            ", ".join(map(str, given[:3])) + (" …" if len(given) > 3 else ""),
            expected="a rollout dump and a train dump of one rollout",
            found=found,
            follows=follows,
            next_step="Give a --dump-details folder, or the rollout dump and its train dump.",
        )
    )


def _reason(path: Path, error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror
    # Whoever shows it names the file.
    return " ".join(str(error).split()).removeprefix(f"{path}: ").removesuffix(".")


def _first_keys(container: Container) -> dict[str, int | None]:
    """The first keys of a pickled dict, and the whole numbers among their values; read as picklers write them. Ends
    with the first value that is no whole number."""
    head, at = container.head, 0
    found: dict[str, int | None] = {}
    if head[:1] == b"\x80":
        at = 2
    if head[at : at + 1] == b"\x95":  # FRAME
        at += 9
    at = _behind_memo(head, at + 1) if head[at : at + 1] == b"}" else len(head)
    if head[at : at + 1] == b"(":
        at += 1
    while at < len(head):
        code = head[at : at + 1]
        if code == b"X" and at + 5 <= len(head):
            size = struct.unpack("<I", head[at + 1 : at + 5])[0]
            key, at = head[at + 5 : at + 5 + size], at + 5 + size
        elif code == b"\x8c" and at + 2 <= len(head):
            size = head[at + 1]
            key, at = head[at + 2 : at + 2 + size], at + 2 + size
        else:
            break
        if at >= len(head):
            break
        at = _behind_memo(head, at)
        name = key.decode("utf-8", "replace")
        code, rest = head[at : at + 1], head[at + 1 :]
        width = {b"K": 1, b"M": 2, b"J": 4}.get(code)
        found[name] = None
        if width is None or len(rest) < width:
            break
        found[name] = int.from_bytes(rest[:width], "little", signed=code == b"J")
        at += 1 + width
    return found


def _behind_memo(head: bytes, at: int) -> int:
    """Behind the instruction that puts a value into the memo, if one is there."""
    return at + {b"q": 2, b"r": 5, b"\x94": 1}.get(head[at : at + 1], 0)
