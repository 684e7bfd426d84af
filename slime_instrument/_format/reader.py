"""Read dump files of every form into records. What a file is shows in its content; only eval dumps show in the name."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_instrument._errors import DumpFormatError
from slime_instrument._format.checks.values import brief, whole_number
from slime_instrument._format.containers import unusable
from slime_instrument._format.records import RankData, RolloutDump, TrainDump
from slime_instrument._format.safe_load import load_dump
from slime_instrument._format.schema import FORMAT_VERSION, REQUIRED_TOP_LEVEL_KEYS, WHOLE_BATCH_FIELDS, DumpKind

__all__ = ["detect_kind", "read_dump", "read_rollout_dump", "read_train_dump", "rollout_dump_of", "train_dump_of"]

PathLike = str | os.PathLike[str]

_EVAL_NAME = re.compile(r"(?:^|[^a-z])eval_-?\d+(?:\D|$)")


def read_train_dump(path: PathLike | Sequence[PathLike]) -> TrainDump:
    """Read a v2 train dump, or the old per-rank files of one rollout.

    Args:
        path: a v2 file, one old per-rank file, or a list of the old files of one rollout.

    Raises:
        DumpFormatError: not a train dump, not safe to read, or files that do not belong together.
        OSError: a file is missing or may not be read.
    """
    if isinstance(path, (str, os.PathLike)):
        file = Path(path)
        return train_dump_of(file, load_dump(file))
    files = [Path(one) for one in path]
    if not files:
        raise DumpFormatError("read_train_dump needs at least one file, got an empty list.")
    dumps = [train_dump_of(file, load_dump(file)) for file in files]
    return dumps[0] if len(dumps) == 1 else _join_ranks(dumps)


def read_rollout_dump(path: PathLike, *, allow_pickle: bool = False, compact: bool = False) -> RolloutDump:
    """Read a rollout dump of any release.

    Args:
        path: the file.
        allow_pickle: read files with objects of arbitrary classes too; this can run code from the file.
        compact: give long lists of ints or floats as ``array.array``, which takes a fraction of the memory.

    Raises:
        DumpFormatError: not a rollout dump, or not safe to read.
        OSError: the file is missing or may not be read.
    """
    file = Path(path)
    return rollout_dump_of(file, load_dump(file, allow_pickle=allow_pickle, compact=compact))


def read_dump(path: PathLike, *, allow_pickle: bool = False, compact: bool = False) -> TrainDump | RolloutDump:
    """Read whichever dump ``path`` is. Arguments and errors as for the two readers above."""
    file = Path(path)
    payload = load_dump(file, allow_pickle=allow_pickle, compact=compact)
    if detect_kind(file, payload).startswith("train"):
        return train_dump_of(file, payload)
    return rollout_dump_of(file, payload)


def detect_kind(path: Path, payload: Any) -> DumpKind:
    """What a loaded payload is.

    A file that has any of the v2 keys of its own counts as v2 even if others are missing, so that the validator can
    say what is wrong with it.

    Raises:
        DumpFormatError: neither a train nor a rollout dump.
    """
    if isinstance(payload, dict):
        if "rollout_data" in payload:
            return "train-rank"
        if "dp_shards" in payload or "format_version" in payload:
            return "train-v2"
        if "samples" in payload:
            return "rollout-eval" if _EVAL_NAME.search(path.stem) else "rollout"
        keys = ", ".join(sorted(map(str, payload))[:6]) or "none"
        raise unusable(path, f"is neither a train nor a rollout dump (top-level keys: {keys})")
    if isinstance(payload, (list, tuple)) and all(isinstance(sample, dict) for sample in payload):
        return "rollout-eval" if _EVAL_NAME.search(path.stem) else "rollout"
    raise unusable(path, f"is neither a train nor a rollout dump (it holds a {type(payload).__name__})")


def train_dump_of(path: Path, payload: Any) -> TrainDump:
    """The record of a loaded train dump.

    Raises:
        DumpFormatError: another kind, another format version, or parts that are not what the format says.
    """
    kind = detect_kind(path, payload)
    if kind == "train-rank":
        return _rank_dump(path, payload)
    if kind != "train-v2":
        raise unusable(path, f"is a {kind} dump, not a train dump")
    version = payload.get("format_version")
    if whole_number(version) != FORMAT_VERSION:
        raise unusable(path, f"has format_version {brief(version)}; this release reads {FORMAT_VERSION}")
    samples, shards = payload.get("samples"), payload.get("dp_shards")
    for name, value in (("samples", samples), ("dp_shards", shards)):
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise unusable(
                path, f"has no list of dicts under {name!r}", next_step="slime-instrument validate says more."
            )
    return TrainDump(
        paths=(path,),
        kind="train-v2",
        format_version=FORMAT_VERSION,
        rollout_id=whole_number(payload.get("rollout_id")),
        rank=whole_number(payload.get("rank")),
        samples=samples,
        dp_shards=shards,
        whole_batch={key: value for key, value in payload.items() if key not in REQUIRED_TOP_LEVEL_KEYS},
    )


def rollout_dump_of(path: Path, payload: Any) -> RolloutDump:
    """The record of a loaded rollout dump.

    Raises:
        DumpFormatError: another kind, or samples that are no list of dicts.
    """
    kind = detect_kind(path, payload)
    if kind != "rollout" and kind != "rollout-eval":
        raise unusable(path, f"is a {kind} dump, not a rollout dump")
    samples = payload["samples"] if isinstance(payload, dict) else payload
    if not isinstance(samples, (list, tuple)) or not all(isinstance(sample, dict) for sample in samples):
        raise unusable(path, "has no list of dicts under 'samples'")
    rollout_id = whole_number(payload.get("rollout_id")) if isinstance(payload, dict) else None
    if rollout_id is None:
        numbers = re.findall(r"\d+", path.stem)
        rollout_id = int(numbers[-1]) if numbers else None
    return RolloutDump(path=path, kind=kind, rollout_id=rollout_id, samples=list(samples))


def _rank_dump(path: Path, payload: dict[str, Any]) -> TrainDump:
    data = payload["rollout_data"]
    rank = whole_number(payload.get("rank"))
    if not isinstance(data, dict) or rank is None:
        raise unusable(path, "is an old train dump without a rank or without columns in rollout_data")
    return TrainDump(
        paths=(path,),
        kind="train-rank",
        format_version=None,
        rollout_id=whole_number(payload.get("rollout_id")),
        rank=rank,
        whole_batch={key: data[key] for key in WHOLE_BATCH_FIELDS if key in data},
        ranks=(RankData(path=path, rank=rank, rollout_data=data),),
    )


def _join_ranks(dumps: list[TrainDump]) -> TrainDump:
    for dump in dumps:
        if dump.kind != "train-rank":
            raise unusable(dump.path, "is a v2 dump, which is whole by itself; a list is for old per-rank files")
    first = dumps[0]
    by_rank: dict[int, TrainDump] = {}
    for dump in dumps:
        if dump.rollout_id != first.rollout_id:
            raise unusable(dump.path, f"is of rollout {dump.rollout_id}, but {first.path} of {first.rollout_id}")
        rank = dump.ranks[0].rank
        if rank in by_rank:
            raise unusable(dump.path, f"is of rank {rank}, and so is {by_rank[rank].path}")
        by_rank[rank] = dump
    ordered = [by_rank[rank] for rank in sorted(by_rank)]
    return TrainDump(
        paths=tuple(dump.path for dump in ordered),
        kind="train-rank",
        format_version=None,
        rollout_id=first.rollout_id,
        rank=None,
        whole_batch=first.whole_batch,
        ranks=tuple(dump.ranks[0] for dump in ordered),
    )
