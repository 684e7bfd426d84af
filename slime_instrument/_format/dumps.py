"""Dumps as small frozen records around the plain dicts of their files, and the readers that make them.

What a file is shows in its content; only the dump of an evaluation shows in its name. Which rollout a file is of stands
in the file; :func:`rollout_id_of` has the one rule for those in which it does not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from slime_instrument._errors import DumpFormatError
from slime_instrument._format.containers import unusable
from slime_instrument._format.safe_load import load_dump, open_dump
from slime_instrument._format.schema import (
    FORMAT_VERSION,
    LAYOUT_FIELDS,
    PROVENANCE,
    REQUIRED_TOP_LEVEL_KEYS,
    WHOLE_BATCH_FIELDS,
    DumpKind,
)
from slime_instrument._format.unpickling import was_list
from slime_instrument._format.values import brief, whole_number

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Provenance:
    """What slime_instrument wrote about one data-parallel shard. Everything is None or empty in slime's own files, and
    where a value is not what it should be.

    Attributes:
        record: all of it, as it stands in the file.
        tensor_parallel, pipeline_parallel, context_parallel, data_parallel: sizes of the run.
        fields: per response-level field where its values came from, such as ``recomputed`` or ``captured``.
        weight_version: number of the weights that the trainer had when it trained these samples, counted as slime's
            engines count them.
    """

    record: Mapping[str, Any]
    tensor_parallel: int | None = None
    pipeline_parallel: int | None = None
    context_parallel: int | None = None
    data_parallel: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    weight_version: int | None = None

    def __bool__(self) -> bool:
        """Whether the file has any."""
        return bool(self.record)

    @classmethod
    def of(cls, shard: Any) -> Provenance:
        """Of an entry of ``dp_shards``, whatever it holds."""
        found = shard.get(PROVENANCE) if isinstance(shard, Mapping) else None
        record = {str(key): value for key, value in found.items()} if isinstance(found, Mapping) else {}
        fields = record.get("fields")
        numbers = {
            name: whole_number(record.get(name))
            for name in (
                "tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel", "weight_version",
            )
        }  # fmt: skip
        for name in ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel"):
            if (numbers[name] or 0) < 1:
                numbers[name] = None
        named = {str(key): value for key, value in fields.items()} if isinstance(fields, Mapping) else {}
        return cls(record, fields=named, **numbers)

    @classmethod
    def of_dump(cls, shards: Sequence[Any]) -> Provenance:
        """Of the first shard that has any: what it says of the run is the same for all."""
        return next((found for shard in shards if (found := cls.of(shard))), cls({}))


Sample = dict[str, Any]


@dataclass(frozen=True)
class RankData:
    """The part of one process in an old train dump, as it stands in its file.

    Attributes:
        path: the file.
        rank: global rank of the process that wrote it.
        rollout_data: slime's columns, one entry per local sample in each; response-level values are this rank's
            context-parallel part, not whole responses.
        cp_rank, cp_size, qkv_format: what the file says of its part; miles' files do, slime's say nothing.
        cut: columns that are not here, because the file holds a piece of each that belongs to no sample (Relax).
    """

    path: Path
    rank: int
    rollout_data: Mapping[str, Any]
    cp_rank: int | None = None
    cp_size: int | None = None
    qkv_format: str | None = None
    cut: tuple[str, ...] = ()

    @property
    def n_samples(self) -> int:
        """Samples on this rank. Ranks of one data-parallel group hold the same ones."""
        lengths = (column_length(self.rollout_data.get(name)) for name in ("response_lengths", "tokens"))
        return next((length for length in lengths if length is not None), 0)

    def sample(self, position: int) -> Sample:
        """Every per-sample value of one local sample, under its column's name."""
        return {name: column[position] for name, column in self.columns.items()}

    @cached_property
    def columns(self) -> dict[str, Any]:
        """The columns that hold one entry per local sample."""
        n = self.n_samples
        whole = (*LAYOUT_FIELDS, *WHOLE_BATCH_FIELDS)
        return {
            name: column.tolist() if was_list(column) else column
            for name, column in self.rollout_data.items()
            if name not in whole and column_length(column) == n
        }


@dataclass(frozen=True)
class TrainDump:
    """A train dump: one v2 file, or the per-rank files that releases before v2 wrote for one rollout.

    Attributes:
        paths: the file, or one per rank.
        kind: ``train-v2`` or ``train-rank``.
        format_version: 2, or None for per-rank files, which have no version.
        rollout_id: the training step's rollout; not a sample's ``rollout_ids``, which names one execution.
        rank: global rank of the writer of a v2 file; None for several per-rank files.
        samples: v2 only: one dict per sample, in rollout order where the file knows it.
        dp_shards: v2 only: layout and schedule of each data-parallel rank.
        whole_batch: values of the whole rollout batch, such as ``raw_reward``, indexed by ``rollout_position``.
        ranks: per-rank files only: each rank's data, apart.
        give_back_memory: for a dump that was read from a file and that nobody has changed: gives back the memory of
            what was read of its tensors, which are read again where they are needed.
    """

    paths: tuple[Path, ...]
    kind: Literal["train-v2", "train-rank"]
    format_version: int | None
    rollout_id: int | None
    rank: int | None
    samples: list[Sample] = field(default_factory=list)
    dp_shards: list[dict[str, Any]] = field(default_factory=list)
    whole_batch: dict[str, Any] = field(default_factory=dict)
    ranks: tuple[RankData, ...] = ()
    give_back_memory: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    @property
    def path(self) -> Path:
        """The file; the first one of several."""
        return self.paths[0]

    @property
    def provenance(self) -> Provenance:
        """What slime_instrument wrote about the run; empty in slime's own files."""
        return Provenance.of_dump(self.dp_shards)


@dataclass(frozen=True)
class RolloutDump:
    """A rollout dump.

    Attributes:
        path: the file.
        kind: ``rollout``, or ``rollout-eval`` for an evaluation, which never belongs to a train dump.
        rollout_id: as :func:`rollout_id_of` finds it (dumps before 2025-07-23 hold none).
        samples: one dict per sample, in the order in which training counts ``rollout_position``.
        give_back_memory: as of :class:`TrainDump`.
    """

    path: Path
    kind: Literal["rollout", "rollout-eval"]
    rollout_id: int | None
    samples: list[Sample]
    give_back_memory: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)


def column_length(column: Any) -> int | None:
    """Entries of a column of rollout_data; None for a value that is no column (a number, a string, a 0-d tensor)."""
    if isinstance(column, (list, tuple)):
        return len(column)
    shape = getattr(column, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) else None


# The number that directly follows one of these words in a file's name, else the first number of the name.
_NAMED_ID = re.compile(r"(?:rollout|rollout_id|step|iter|iteration|eval)[_\-=]?(-?\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
# slime puts "eval_" in front of the id, wherever the user's template has it: "stepeval_0.pt".
_EVAL_NAME = re.compile(r"(?<!retri)eval_-?\d+(?!\d)")


def rollout_id_of(path: Path, payload: Any = None) -> int | None:
    """Which rollout a dump is of: the id stored in the file, else by its name, else None.

    The rule for names: the number behind ``rollout``, ``step``, ``iter`` or ``eval`` (the last of several such),
    else the first number; looked for in the file's name, and where that holds no number in the name of its folder.
    So ``12.pt``, ``rollout_12.pt``, ``step12.pt``, ``12_seed1.pt``, ``seed1_step12.pt``, ``eval_12.pt`` and
    ``12/rollout.pt`` are of rollout 12.

    Args:
        path: the file.
        payload: what is in it, if it was loaded.
    """
    stored = whole_number(payload.get("rollout_id")) if isinstance(payload, dict) else None
    if stored is not None:
        return stored
    named = _NAMED_ID.findall(_telling_name(path))
    numbers = named[-1:] or _NUMBER.findall(_telling_name(path))[:1]
    return int(numbers[0]) if numbers and len(numbers[0]) < 19 else None


def is_eval_name(path: Path) -> bool:
    """Whether slime named this file as the dump of an evaluation. Nothing in the file tells."""
    return _EVAL_NAME.search(_telling_name(path)) is not None


def _telling_name(path: Path) -> str:
    """The file's name, or its folder's where the file's holds no number."""
    return path.stem if _NUMBER.search(path.stem) else path.parent.name


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
        payload, give_back = open_dump(file)
        return replace(train_dump_of(file, payload), give_back_memory=give_back)
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
        compact: give long lists of ints or floats as tensors, which takes a fraction of the memory.

    Raises:
        DumpFormatError: not a rollout dump, or not safe to read.
        OSError: the file is missing or may not be read.
    """
    file = Path(path)
    payload, give_back = open_dump(file, allow_pickle=allow_pickle, compact=compact)
    return replace(rollout_dump_of(file, payload), give_back_memory=give_back)


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
        if "samples" in payload and "rank" in payload:
            return "train-rank"
        if "samples" in payload:
            return "rollout-eval" if is_eval_name(path) else "rollout"
        keys = ", ".join(sorted(map(str, payload))[:6]) or "none"
        raise unusable(path, f"is neither a train nor a rollout dump (top-level keys: {keys})")
    if isinstance(payload, (list, tuple)) and all(isinstance(sample, dict) for sample in payload):
        return "rollout-eval" if is_eval_name(path) else "rollout"
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
        rollout_id=rollout_id_of(path, payload),
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
    return RolloutDump(path=path, kind=kind, rollout_id=rollout_id_of(path, payload), samples=list(samples))


def _rank_dump(path: Path, payload: dict[str, Any]) -> TrainDump:
    cut: tuple[str, ...] = ()
    data = payload.get("rollout_data")
    if "rollout_data" not in payload:
        data, cut = _columns_of(payload["samples"])
    rank = whole_number(payload.get("rank"))
    if not isinstance(data, dict) or rank is None:
        raise unusable(path, "is an old train dump without a rank or without columns in rollout_data")
    for name, expected in (("cp_rank", int), ("cp_size", int), ("qkv_format", str)):
        if type(payload.get(name)) not in (expected, type(None)):
            raise unusable(path, f"has {brief(payload[name])} under {name}")
    recorded = {name: payload.get(name) for name in ("cp_rank", "cp_size", "qkv_format")}
    return TrainDump(
        paths=(path,),
        kind="train-rank",
        format_version=None,
        rollout_id=rollout_id_of(path, payload),
        rank=rank,
        whole_batch={key: data[key] for key in WHOLE_BATCH_FIELDS if key in data},
        ranks=(RankData(path=path, rank=rank, rollout_data=data, **recorded, cut=cut),),
    )


def _columns_of(samples: Any) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
    """Columns of a rank that Relax wrote as one dict per sample; None for anything else.

    Relax cuts every list to as many entries as samples, also those that have no entry per sample; and it numbers the
    samples of each rank from 0.
    """
    if not isinstance(samples, list) or not all(isinstance(sample, dict) for sample in samples):
        return None, ()
    own = [sample for sample in samples if sample.get("tokens") is not None]
    names = [str(name) for name in dict.fromkeys(name for sample in own for name in sample)]
    cut = tuple(name for name in names if name in (*WHOLE_BATCH_FIELDS, *LAYOUT_FIELDS))
    made_up = ("sample_index", "decoded_tokens")
    return {name: [sample.get(name) for sample in own] for name in names if name not in (*cut, *made_up)}, cut


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
