"""``slime-instrument export DUMP… -o FILE.parquet``: a flat table for polars, DuckDB, pandas."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from slime_instrument._cli.output import (
    CANNOT_LOOK,
    AllowPickle,
    Json,
    check_output,
    counted,
    fail,
    finish,
    note,
    print_json,
    progress,
    reporting_errors,
)

_EPILOG = (
    "Examples: slime-instrument export train_data/0.pt -o 0.parquet --level token; "
    "slime-instrument export train_data -o all.parquet"
)


class Level(str, Enum):
    """What one row is."""

    sample = "sample"
    token = "token"


def export(
    dumps: Annotated[list[Path], typer.Argument(metavar="DUMP...", help="Dumps, or folders of dumps.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE.parquet", help="The file to write.")],
    level: Annotated[Level, typer.Option(help="One row per sample or per response token.")] = Level.sample,
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Write dumps as one Parquet table with a stable, versioned schema.

    Exit status 2: a file could not be read; the others are in the table.
    """
    try:
        import polars  # noqa: F401  (said here, before any file is opened)
    except ImportError:
        fail("export needs polars: pip install 'slime-instrument[analysis]'", as_json=json)
    with reporting_errors(as_json=json), progress("exporting"):
        from slime_instrument._analysis.export import SCHEMA_VERSION
        from slime_instrument._analysis.export import export as write

        check_output(output, (".parquet", ".pq"))
        unreadable: list[Exception] = []
        n = write(dumps, output, level=level.value, allow_pickle=allow_pickle, on_unreadable=unreadable.append)
    for error in unreadable:
        note(f"slime_instrument: not used: {error}")
    record = {"output": str(output), "level": level.value, "n_rows": n, "schema_version": SCHEMA_VERSION}
    if json:
        print_json(record)
    else:
        print(f"{output}: {counted(n, 'row')}, one per {level.value}, schema version {SCHEMA_VERSION}")
    if unreadable:
        finish(CANNOT_LOOK)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG)(export)
