"""What the readers return: small frozen records around the plain dicts of the files."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slime_instrument._format.schema import LAYOUT_FIELDS, WHOLE_BATCH_FIELDS

__all__ = ["RankData", "RolloutDump", "TrainDump"]

Sample = dict[str, Any]


@dataclass(frozen=True)
class RankData:
    """The part of one process in an old train dump, as it stands in its file.

    Attributes:
        path: the file.
        rank: global rank of the process that wrote it.
        rollout_data: slime's columns, one entry per local sample in each; response-level values are this rank's
            context-parallel part, not whole responses.
    """

    path: Path
    rank: int
    rollout_data: Mapping[str, Any]

    @property
    def n_samples(self) -> int:
        """Samples on this rank. Ranks of one data-parallel group hold the same ones."""
        lengths = (column_length(self.rollout_data.get(name)) for name in ("response_lengths", "tokens"))
        return next((length for length in lengths if length is not None), 0)

    def sample(self, position: int) -> Sample:
        """Every per-sample value of one local sample, under its column's name."""
        return {name: column[position] for name, column in self.columns().items()}

    def columns(self) -> dict[str, Any]:
        """The columns that hold one entry per local sample."""
        n = self.n_samples
        whole = (*LAYOUT_FIELDS, *WHOLE_BATCH_FIELDS)
        return {
            name: column
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

    @property
    def path(self) -> Path:
        """The file; the first one of several."""
        return self.paths[0]


@dataclass(frozen=True)
class RolloutDump:
    """A rollout dump.

    Attributes:
        path: the file.
        kind: ``rollout``, or ``rollout-eval`` for an evaluation, which never belongs to a train dump.
        rollout_id: from the file, else from its name (dumps before 2025-07-23 hold none), else None.
        samples: one dict per sample, in the order in which training counts ``rollout_position``.
    """

    path: Path
    kind: Literal["rollout", "rollout-eval"]
    rollout_id: int | None
    samples: list[Sample]


def column_length(column: Any) -> int | None:
    """Entries of a column of rollout_data; None for a value that is no column (a number, a string, a 0-d tensor)."""
    if isinstance(column, (list, tuple, array)):
        return len(column)
    shape = getattr(column, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) else None
