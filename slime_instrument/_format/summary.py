"""What is in a dump: the record behind ``slime-instrument inspect``.

The summary looks at types and shapes only. Tensors are memory-mapped, so a file of many gigabytes costs no more than
its directory; values are read for the one sample that was asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slime_instrument._errors import DumpFormatError
from slime_instrument._format.dumps import RankData, TrainDump, read_dump
from slime_instrument._format.references import TensorReference, count_references
from slime_instrument._format.schema import ID_COLUMNS, LAYOUT_FIELDS
from slime_instrument._format.unpickling import was_list
from slime_instrument._format.values import NonFinite, plain_value


def inspect_dump(
    path: str | os.PathLike[str], *, sample: int | None = None, allow_pickle: bool = False
) -> dict[str, Any]:
    """Summarise a dump of any kind as plain values, ready for JSON.

    Args:
        path: the file.
        sample: add every field of the sample at this position in the file (in the columns of an old per-rank file).
        allow_pickle: read rollout dumps with objects of arbitrary classes; this can run code from the file.

    Returns:
        ``kind``, ``format_version``, ``rollout_id``, ``rank``, ``n_samples``, ``fields``, ``whole_batch`` and
        ``dp_shards``, and ``references``: how many tensors are in files of their own, and how many of those are gone.
        With ``sample`` also ``sample``, where NaN and infinities are None, and ``sample_non_finite``,
        which counts them by field. ``file`` and ``bytes`` say what was read.

    Raises:
        DumpFormatError: not a dump, not safe to read, or no such sample.
        OSError: the file is missing or may not be read.
    """
    dump = read_dump(path, allow_pickle=allow_pickle, compact=True)
    rank = dump.ranks[0] if isinstance(dump, TrainDump) and dump.ranks else None
    samples = dump.samples if rank is None else [rank.sample(i) for i in range(rank.n_samples)]
    record: dict[str, Any] = {
        "file": str(path),
        "bytes": Path(path).stat().st_size,
        "kind": dump.kind,
        "format_version": dump.format_version if isinstance(dump, TrainDump) else None,
        "rollout_id": dump.rollout_id,
        "rank": dump.rank if isinstance(dump, TrainDump) else None,
        "n_samples": len(samples),
        "fields": _summaries(samples),
        "whole_batch": _summaries([dump.whole_batch]) if isinstance(dump, TrainDump) else {},
        "dp_shards": _shards(dump, rank) if isinstance(dump, TrainDump) else [],
        "references": count_references(samples).as_dict(),
    }
    if sample is not None:
        if not 0 <= sample < len(samples):
            what = f"samples 0 to {len(samples) - 1}" if samples else "no samples"
            raise DumpFormatError(f"{path}: has {what}, but sample {sample} was asked for.")
        counts: dict[str, NonFinite] = {}
        record["sample"] = {str(name): plain_value(value, counts, str(name)) for name, value in samples[sample].items()}
        record["sample_non_finite"] = {name: count.as_dict() for name, count in counts.items()}
    return record


@dataclass
class _Summary:
    """One field over all samples."""

    types: dict[str, None] = field(default_factory=dict)
    dtypes: dict[str, None] = field(default_factory=dict)
    low: list[int] | None = None
    high: list[int] | None = None
    n: int = 0
    n_none: int = 0
    same_dimensions: bool = True

    def add(self, value: Any) -> None:
        self.n += 1
        if value is None:
            self.n_none += 1
            return
        shape = None
        if isinstance(value, torch.Tensor):
            listed = was_list(value)
            self.types["list" if listed else "tensor"] = None
            own = "float" if value.is_floating_point() else "int"
            self.dtypes[own if listed else str(value.dtype).removeprefix("torch.")] = None
            shape = list(value.shape)
        elif isinstance(value, TensorReference):
            self.types["reference"] = None
            self.dtypes[value.dtype] = None
            shape = list(value.shape)
        else:
            self.types[type(value).__name__] = None
            if isinstance(value, (list, tuple)):
                shape = [len(value)]
                if value:
                    self.dtypes[type(value[0]).__name__] = None
        if shape is None:
            return
        if self.low is None or self.high is None:
            self.low, self.high = list(shape), list(shape)
        elif len(shape) != len(self.low):
            self.same_dimensions = False
        else:
            self.low = [min(pair) for pair in zip(self.low, shape, strict=True)]
            self.high = [max(pair) for pair in zip(self.high, shape, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        shape = None
        if self.low is not None and self.high is not None and self.same_dimensions:
            shape = {"min": self.low, "max": self.high}
        return {
            "type": "|".join(self.types) or None,
            "dtype": "|".join(self.dtypes) or None,
            "shape": shape,
            "samples": self.n,
            "none": self.n_none,
        }


def _summaries(samples: Iterable[Mapping[Any, Any]]) -> dict[str, Any]:
    """Per field: type, dtype (of a list: its entries'), smallest and largest shape, how many have it, how many None."""
    summaries: dict[str, _Summary] = {}
    for sample in samples:
        for name, value in sample.items():
            summaries.setdefault(str(name), _Summary()).add(value)
    return {name: summary.as_dict() for name, summary in summaries.items()}


def _shards(dump: TrainDump, rank: RankData | None) -> list[dict[str, Any]]:
    """Layout of each shard as plain values; other values of a shard, which may be large, as summaries."""
    if rank is not None:
        known = {name: rank.rollout_data[name] for name in (*ID_COLUMNS, *LAYOUT_FIELDS) if name in rank.rollout_data}
        return [{"rank": rank.rank, "n_samples": rank.n_samples, **{k: plain_value(v) for k, v in known.items()}}]
    counts: dict[Any, int] = {}
    for sample in dump.samples:
        key = repr(sample.get("data_parallel_rank"))
        counts[key] = counts.get(key, 0) + 1
    shards = []
    for shard in dump.dp_shards:
        record: dict[str, Any] = {"n_samples": counts.get(repr(shard.get("data_parallel_rank")), 0)}
        for name, value in shard.items():
            whole = name in (*ID_COLUMNS, *LAYOUT_FIELDS) or not isinstance(value, (torch.Tensor, list, tuple))
            record[str(name)] = plain_value(value) if whole else _summaries([{name: value}])[str(name)]
        shards.append(record)
    return shards
