"""Dumps as flat Parquet tables, one row per sample or per response token.

The schema has a version, :data:`SCHEMA_VERSION`, in the column ``schema_version``; columns are added at the end, and
never change their meaning or type within a version. Column ``kind`` says which side a row is from.

polars writes the file; pyarrow is not needed. :func:`rows` is the same for one file at a time, as plain dicts.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from slime_instrument._analysis.drift import known_versions
from slime_instrument._errors import DumpError, DumpFormatError, five_parts
from slime_instrument._format.dumps import RolloutDump, TrainDump, read_dump
from slime_instrument._format.pairs import dump_files
from slime_instrument._format.schema import CONTEXT_PARALLEL_FIELDS
from slime_instrument._format.values import (
    as_list,
    integers,
    length_of,
    log_probs,
    number,
    plain_value,
    truth,
    whole_number,
)

if TYPE_CHECKING:
    import polars as pl

SCHEMA_VERSION = 1
Level = Literal["sample", "token"]

_ID_COLUMNS: dict[str, str] = {
    "schema_version": "int32",
    "kind": "str",
    "file": "str",
    "rollout_id": "int64",
    "rollout_position": "int64",
    "sample_index": "int64",
    "execution_id": "int64",
    "data_parallel_rank": "int32",
}
_SAMPLE_COLUMNS: dict[str, str] = {
    "total_length": "int64",
    "response_length": "int64",
    "trained_tokens": "int64",
    "reward": "float64",
    "raw_reward": "float64",
    "status": "str",
    "removed": "bool",
    "weight_version_min": "int64",
    "weight_version_max": "int64",
    **{f"{name}_mean": "float64" for name in CONTEXT_PARALLEL_FIELDS},
    "rewards_json": "str",
}
_TOKEN_COLUMNS: dict[str, str] = {
    "token": "int32",
    "token_id": "int64",
    "loss_mask": "bool",
    **dict.fromkeys(CONTEXT_PARALLEL_FIELDS, "float32"),
}


def columns(level: Level) -> dict[str, str]:
    """Name and type of every column, in order. ``execution_id`` is slime's per-sample ``rollout_ids``."""
    return {**_ID_COLUMNS, **(_SAMPLE_COLUMNS if level == "sample" else _TOKEN_COLUMNS)}


def tables(
    path: str | os.PathLike[str], *, level: Level = "sample", allow_pickle: bool = False, batch: int = 256
) -> Iterator[pl.DataFrame]:
    """The rows of one dump of any kind, ``batch`` samples at a time.

    Raises:
        DumpFormatError: no dump, or not safe to read.
        OSError: the file is missing or may not be read.
    """
    import polars as pl

    schema = _polars_schema(level)
    dump = read_dump(path, allow_pickle=allow_pickle)
    samples = _samples(dump)
    for start in range(0, len(samples), batch):
        chunk = [_described(dump, sample, start + i) for i, sample in enumerate(samples[start : start + batch])]
        if level == "sample":
            yield pl.DataFrame([{**ids, **_sample_row(sample)} for ids, sample in chunk], schema=schema)
        else:
            frames = [_token_frame(ids, sample, schema) for ids, sample in chunk]
            yield pl.concat(frames) if frames else pl.DataFrame(schema=schema)


def _samples(dump: TrainDump | RolloutDump) -> list[dict[str, Any]]:
    if isinstance(dump, TrainDump) and dump.ranks:
        raise DumpFormatError(
            f"{dump.path}: is a per-rank file, which holds parts of responses. Not exported. "
            "slime-instrument convert makes a v2 file of all ranks' files."
        )
    return dump.samples


def _described(dump: TrainDump | RolloutDump, sample: dict[str, Any], i: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The identifying columns of a sample, and the sample under one set of names for both sides."""
    trained = isinstance(dump, TrainDump)
    execution = next((sample[name] for name in ("rollout_ids", "group_ids", "rollout_id") if name in sample), None)
    ids = {
        "schema_version": SCHEMA_VERSION,
        "kind": dump.kind,
        "file": str(dump.path),
        "rollout_id": dump.rollout_id,
        "rollout_position": whole_number(sample.get("rollout_position")) if trained else i,
        "sample_index": whole_number(sample.get("sample_index" if trained else "index")),
        "execution_id": whole_number(execution),
        "data_parallel_rank": whole_number(sample.get("data_parallel_rank")),
    }
    if not trained:
        tokens = sample.get("tokens")
        own = {**sample, "response_lengths": sample.get("response_length"), "total_lengths": length_of(tokens)}
        return ids, {**own, "loss_masks": sample.get("loss_mask"), "raw": sample.get("reward")}
    assert isinstance(dump, TrainDump)
    rewards, position = as_list(dump.whole_batch.get("raw_reward")) or [], whole_number(sample.get("rollout_position"))
    raw = rewards[position] if position is not None and 0 <= position < len(rewards) else None
    return ids, {**sample, "reward": sample.get("rewards"), "raw": raw}


def _sample_row(sample: dict[str, Any]) -> dict[str, Any]:
    response = whole_number(sample.get("response_lengths"))
    mask = integers(sample.get("loss_masks"))
    versions = known_versions(sample)
    row: dict[str, Any] = {
        "total_length": whole_number(sample.get("total_lengths")),
        "response_length": response,
        "trained_tokens": int((mask != 0).sum()) if mask is not None else response,
        "reward": number(sample.get("reward")),
        "raw_reward": number(sample.get("raw")),
        "status": str(sample["status"]) if sample.get("status") is not None else None,
        "removed": truth(sample["remove_sample"]) if "remove_sample" in sample else None,
        "weight_version_min": min(versions, default=None),
        "weight_version_max": max(versions, default=None),
    }
    for name in CONTEXT_PARALLEL_FIELDS:
        row[f"{name}_mean"] = _mean(sample.get(name), mask)
    # A reward that is no number, such as a dict of several, goes whole into a column of its own.
    several = {
        name: plain_value(sample[key])
        for name, key in (("reward", "reward"), ("raw_reward", "raw"))
        if sample.get(key) is not None and number(sample[key]) is None
    }
    row["rewards_json"] = json.dumps(several, allow_nan=False, ensure_ascii=False) if several else None
    return row


def _mean(value: Any, mask: torch.Tensor | None) -> float | None:
    """Mean over trained tokens with a finite value; None where there is none."""
    converted = log_probs(value)
    if converted is None:
        return None
    values, missing = converted
    usable = values.isfinite()
    if missing is not None:
        usable &= ~missing
    if mask is not None and len(mask) == len(values):
        usable &= mask != 0
    return float(values[usable].double().mean()) if bool(usable.any()) else None


def _token_frame(ids: dict[str, Any], sample: dict[str, Any], schema: dict[str, Any]) -> pl.DataFrame:
    """One row per response token. A field of another length is null: it cannot be aligned."""
    import polars as pl

    tokens, mask = integers(sample.get("tokens")), integers(sample.get("loss_masks"))
    # Never more rows than the sample holds values: a damaged file may state anything.
    longest = max(length_of(sample.get(name)) or 0 for name in ("tokens", "loss_masks", *CONTEXT_PARALLEL_FIELDS))
    n = min(max(whole_number(sample.get("response_lengths")) or 0, 0), longest)
    response = tokens[len(tokens) - n :] if tokens is not None and len(tokens) >= n else None
    data: dict[str, Any] = {name: pl.repeat(value, n, dtype=schema[name], eager=True) for name, value in ids.items()}
    data["token"] = torch.arange(n, dtype=torch.int32).numpy()
    data["token_id"] = response.numpy() if response is not None else None
    data["loss_mask"] = (mask != 0).numpy() if mask is not None and len(mask) == n else None
    for name in CONTEXT_PARALLEL_FIELDS:
        converted = log_probs(sample.get(name))
        data[name] = None
        if converted is not None and len(converted[0]) == n:
            values = pl.Series(name, converted[0].contiguous().numpy())
            missing = converted[1]
            if missing is not None:
                absent = pl.Series(missing.numpy())
                values = pl.select(pl.when(~absent).then(values)).to_series()
            data[name] = values
    columns = [
        pl.repeat(None, n, dtype=schema[name], eager=True).alias(name)
        if data[name] is None
        else pl.Series(name, data[name]).cast(schema[name])
        for name in schema
    ]
    return pl.DataFrame(columns)


def _polars_schema(level: Level) -> dict[str, Any]:
    import polars as pl

    types = {
        "str": pl.String,
        "bool": pl.Boolean,
        "int32": pl.Int32,
        "int64": pl.Int64,
        "float32": pl.Float32,
        "float64": pl.Float64,
    }
    return {name: types[kind] for name, kind in columns(level).items()}


def rows(path: str | os.PathLike[str], *, level: Level = "sample", allow_pickle: bool = False) -> list[dict[str, Any]]:
    """The rows of one file as plain dicts; in Ray Data: ``from_items(files).flat_map(lambda one: rows(one["path"]))``.

    Errors as for :func:`slime_instrument._format.dumps.read_dump`.
    """
    return [
        row for table in tables(path, level=level, allow_pickle=allow_pickle) for row in table.iter_rows(named=True)
    ]


def export(
    paths: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    level: Level = "sample",
    allow_pickle: bool = False,
    on_unreadable: Callable[[DumpFormatError | OSError], None] | None = None,
) -> int:
    """Write the rows of one or many dumps to one Parquet file, and return how many there are.

    Files stream: memory holds a few batches of one dump, however many there are. The file appears whole or not at all.

    Args:
        paths: dumps, or folders of them.
        output: the Parquet file.
        level: one row per ``sample`` or per response ``token``.
        allow_pickle: read rollout dumps with objects of arbitrary classes; this can run code from them.
        on_unreadable: told of a file that cannot be read, while the others are exported; without it that raises.

    Raises:
        DumpFormatError: a file is no dump, or nothing is there to export.
        DumpError: the result cannot be written.
        OSError: a file is missing or may not be read.
    """
    from polars.io.plugins import register_io_source

    files = dump_files([Path(path) for path in paths])
    if not files:
        raise DumpFormatError(f"{paths[0] if paths else 'export'}: holds no dump files (*.pt). Nothing was exported.")
    counted = 0
    trouble: list[Exception] = []

    def stream(
        with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        nonlocal counted
        del predicate, n_rows, batch_size  # nothing filters on the way into a file
        for n, file in enumerate(files):
            before = counted
            try:
                for table in tables(file, level=level, allow_pickle=allow_pickle):
                    counted += len(table)
                    yield table.select(with_columns) if with_columns is not None else table
            except (DumpFormatError, OSError) as error:
                nothing_left = n == len(files) - 1 and not counted
                if on_unreadable is None or counted > before or nothing_left:
                    trouble.append(error)  # polars would wrap it
                    raise
                on_unreadable(error)

    target = Path(output)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    metadata = {"slime_instrument.schema_version": str(SCHEMA_VERSION), "slime_instrument.level": level}
    try:
        lazy = register_io_source(io_source=stream, schema=_polars_schema(level))
        lazy.sink_parquet(part, metadata=metadata)
        os.replace(part, target)
    except Exception as error:
        if trouble:
            raise trouble[0] from None
        message = five_parts(
            str(target),
            expected="to write a Parquet file",
            found=(str(error).splitlines() or [type(error).__name__])[0].replace(str(part), str(target)),
            follows="Nothing was exported.",
            next_step="Check space and rights of the folder.",
        )
        raise DumpError(message) from error
    finally:
        with contextlib.suppress(OSError):  # renamed, or never made
            part.unlink()
    return counted
