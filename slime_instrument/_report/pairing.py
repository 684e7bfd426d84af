"""Which rollout dump belongs to which train dump, before anything large is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slime_instrument._errors import DumpFormatError, five_parts
from slime_instrument._format.containers import examine, looks_like_train_dump
from slime_instrument._format.dumps import read_rollout_dump, read_train_dump

__all__ = ["FilePair", "Pairing", "Skipped", "find_pairs"]

_FOLDERS = ("rollout_data", "train_data")
_EVAL = re.compile(r"(?:^|[^a-z])eval_-?\d+(?:\D|$)")


@dataclass(frozen=True)
class FilePair:
    """A rollout dump and the train dump of the same rollout: one v2 file, or the old per-rank files."""

    rollout_id: int | None
    rollout: Path
    train: tuple[Path, ...]

    def as_dict(self) -> dict[str, object]:
        train = str(self.train[0]) if len(self.train) == 1 else [str(path) for path in self.train]
        return {"rollout": str(self.rollout), "train": train}


@dataclass(frozen=True)
class Skipped:
    """A file that is not in the report, and why."""

    file: Path
    reason: str

    def as_dict(self) -> dict[str, str]:
        return {"file": str(self.file), "reason": self.reason}


@dataclass
class Pairing:
    """Pairs in the order of their rollout ids, and what is left over."""

    pairs: list[FilePair] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)


def find_pairs(given: Sequence[Path], *, allow_pickle: bool = False) -> Pairing:
    """Sort dumps into pairs.

    Args:
        given: folders as slime's ``--dump-details`` writes them, single dump files, or both.
        allow_pickle: read rollout dumps with arbitrary objects where their name does not tell their rollout.

    Raises:
        DumpFormatError: a folder holds neither ``rollout_data`` nor ``train_data``.
        OSError: something that was given does not exist.
    """
    pairing = Pairing()
    rollouts: dict[int | None, list[Path]] = {}
    trains: dict[int | None, list[Path]] = {}
    for file in _files(given):
        try:
            if looks_like_train_dump(examine(file)):
                trains.setdefault(read_train_dump(file).rollout_id, []).append(file)
            elif _EVAL.search(file.stem):
                pairing.skipped.append(Skipped(file, "dump of an evaluation; no training belongs to it"))
            else:
                rollouts.setdefault(_rollout_id(file, allow_pickle), []).append(file)
        except (DumpFormatError, OSError) as error:
            if isinstance(error, OSError) and file in given:
                raise
            pairing.skipped.append(Skipped(file, " ".join(str(error).split())))
    # Names that say nothing: two files that somebody put side by side are meant to be a pair; compare says so if the
    # ids inside differ.
    if len(rollouts) == len(trains) == 1 and not rollouts.keys() & trains.keys() and len(given) > 1:
        rollouts = dict.fromkeys(trains, next(iter(rollouts.values())))
    _match(rollouts, trains, pairing)
    return pairing


def _match(rollouts: dict[int | None, list[Path]], trains: dict[int | None, list[Path]], pairing: Pairing) -> None:
    for rollout_id in sorted({*rollouts, *trains}, key=lambda one: (one is None, one or 0)):
        name = f"rollout {rollout_id}" if rollout_id is not None else "an unknown rollout"
        sources, trained = rollouts.get(rollout_id, []), trains.get(rollout_id, [])
        if not sources or not trained:
            lacking = "train" if sources else "rollout"
            pairing.skipped += [Skipped(file, f"no {lacking} dump of {name} beside it") for file in sources + trained]
            continue
        pairing.skipped += [Skipped(file, f"second dump of {name}; {sources[0]} was used") for file in sources[1:]]
        pairing.pairs.append(FilePair(rollout_id, sources[0], tuple(trained)))


def _files(given: Iterable[Path]) -> list[Path]:
    files: dict[Path, None] = {}
    for path in given:
        if not path.is_dir():
            files[path] = None
            continue
        folders = [path / name for name in _FOLDERS if (path / name).is_dir()]
        found = [file for folder in folders for file in sorted(folder.iterdir()) if file.suffix in (".pt", ".pkl")]
        if not folders:
            raise DumpFormatError(
                five_parts(
                    str(path),
                    expected="a folder with rollout_data/ and train_data/, as --dump-details writes it",
                    found="neither",
                    follows="No report was written.",
                    next_step="Give that folder, or a rollout dump and its train dump.",
                )
            )
        files.update(dict.fromkeys(found))
    return list(files)


def _rollout_id(file: Path, allow_pickle: bool) -> int | None:
    """From the name where it has a number: reading a rollout dump to learn one number can take minutes."""
    numbers = re.findall(r"\d+", file.stem)
    return int(numbers[-1]) if numbers else read_rollout_dump(file, allow_pickle=allow_pickle).rollout_id
