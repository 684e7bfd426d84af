"""Dumps as flat Parquet tables, one row per sample or per response token.

The schema has a version, :data:`SCHEMA_VERSION`, in the column ``schema_version``; columns are added at the end, and
never change their meaning or type within a version. Column ``kind`` says which side a row is from.

polars writes the file; pyarrow is not needed. :func:`tables` is the same for one file at a time and pure, so that it
can be mapped over files by anything, such as Ray Data's ``flat_map``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_instrument._analysis.flat import SCHEMA_VERSION, Level, columns, polars_schema, tables
from slime_instrument._errors import DumpError, DumpFormatError, five_parts

if TYPE_CHECKING:
    import polars as pl

__all__ = ["SCHEMA_VERSION", "Level", "columns", "export", "rows", "tables"]


def rows(path: str | os.PathLike[str], *, level: Level = "sample", allow_pickle: bool = False) -> list[dict[str, Any]]:
    """The rows of one file as plain dicts; for ``ray.data.from_items(files).flat_map(rows)`` and the like.

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
) -> int:
    """Write the rows of one or many dumps to one Parquet file, and return how many there are.

    Files stream: memory holds a few batches of one dump, however many there are. The file appears whole or not at all.

    Args:
        paths: dumps, or folders of them.
        output: the Parquet file.
        level: one row per ``sample`` or per response ``token``.
        allow_pickle: read rollout dumps with objects of arbitrary classes; this can run code from them.

    Raises:
        DumpFormatError: a file is no dump, or nothing is there to export.
        DumpError: the result cannot be written.
        OSError: a file is missing or may not be read.
    """
    from polars.io.plugins import register_io_source

    files = [file for path in map(Path, paths) for file in (sorted(path.glob("*.pt")) if path.is_dir() else [path])]
    if not files:
        raise DumpFormatError(f"{paths[0] if paths else 'export'}: holds no dump files (*.pt). Nothing was exported.")
    counted = 0
    trouble: list[Exception] = []

    def stream(
        with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        nonlocal counted
        del predicate, n_rows, batch_size  # nothing filters on the way into a file
        try:
            for file in files:
                for table in tables(file, level=level, allow_pickle=allow_pickle):
                    counted += len(table)
                    yield table.select(with_columns) if with_columns is not None else table
        except (DumpFormatError, OSError) as error:
            trouble.append(error)  # polars would wrap it
            raise

    target = Path(output)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    metadata = {"slime_instrument.schema_version": str(SCHEMA_VERSION), "slime_instrument.level": level}
    try:
        lazy = register_io_source(io_source=stream, schema=polars_schema(level))
        lazy.sink_parquet(part, metadata=metadata, mkdir=True)
        os.replace(part, target)
    except Exception as error:
        if trouble:
            raise trouble[0] from None
        message = five_parts(
            str(target),
            expected="to write a Parquet file",
            found=(str(error).splitlines() or [type(error).__name__])[0],
            follows="Nothing was exported.",
            next_step="Check space and rights of the folder.",
        )
        raise DumpError(message) from error
    finally:
        with contextlib.suppress(OSError):  # renamed, or never made
            part.unlink()
    return counted
