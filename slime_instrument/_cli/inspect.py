"""``slime-instrument inspect DUMP``: what is in a dump."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from slime_instrument._cli.output import (
    CANNOT_LOOK,
    AllowPickle,
    Json,
    UsageError,
    console,
    counted,
    finish,
    note,
    print_json,
    reporting_errors,
    shown,
)
from slime_instrument._errors import DumpFormatError

_EPILOG = "Example: slime-instrument inspect dumps/train_data/0.pt --sample 3"


def inspect(
    dump: Annotated[
        Path, typer.Argument(metavar="DUMP", help="A train dump (v2 or old), a rollout dump, or a folder of them.")
    ],
    sample: Annotated[
        int | None, typer.Option("--sample", metavar="N", help="Show every field of the sample at this position.")
    ] = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Show what is in a dump: kind, samples, fields with their types and shapes, shards."""
    with reporting_errors(as_json=json):
        from slime_instrument._format.summary import inspect_dump

        if dump.is_dir():
            _each(dump, sample, allow_pickle=allow_pickle, as_json=json)
            return
        record = inspect_dump(dump, sample=sample, allow_pickle=allow_pickle)
        if json:
            print_json(record)
        else:
            _print(record)


def _each(folder: Path, sample: int | None, *, allow_pickle: bool, as_json: bool) -> None:
    """One line per dump of a folder; a file that cannot be read is named, and the others are shown."""
    from slime_instrument._format.pairs import dump_files
    from slime_instrument._format.summary import inspect_dump

    files = dump_files([folder])
    if not files:
        raise UsageError(f"{folder}: holds no dumps. Nothing was shown.")
    records = []
    for file in files:
        try:
            records.append(inspect_dump(file, sample=sample, allow_pickle=allow_pickle))
        except (DumpFormatError, OSError) as error:
            what = str(error) if isinstance(error, DumpFormatError) else f"{file}: {error.strerror or error}"
            note(f"slime_instrument: {what}")
    if as_json:
        print_json({"files": records})
    else:
        for one in records:
            samples = counted(one["n_samples"], "sample")
            console().print(
                shown(f"{one['file']}: {one['kind']}, rollout {one['rollout_id']}, {samples}, {one['bytes']} bytes")
            )
    if len(records) < len(files):
        finish(CANNOT_LOOK)


def _print(record: dict[str, Any]) -> None:
    from slime_instrument._format.references import ReferenceCounts

    out = console()
    version = f", format version {record['format_version']}" if record["format_version"] is not None else ""
    out.print(shown(f"{record['file']}: {record['kind']}{version}, {record['bytes']} bytes"))
    out.print(f"rollout {record['rollout_id']}, {counted(record['n_samples'], 'sample')}")
    for shard in record["dp_shards"]:
        rank = shard.get("data_parallel_rank")
        whose = (
            f"rank {shard.get('rank')}" if rank is None else f"data-parallel rank {rank}, from rank {shard.get('rank')}"
        )
        out.print(shown(f"  {whose}: {shard['n_samples']} samples"))
    _print_fields("field", record["fields"])
    if record["references"]["total"]:
        out.print(shown(str(ReferenceCounts(**record["references"]))))
    if record["whole_batch"]:
        _print_fields("whole batch", record["whole_batch"])
    if "sample" in record:
        out.print("sample:")
        for name, value in record["sample"].items():
            counts = record["sample_non_finite"].get(name)
            beside = (
                "" if counts is None else f"  [not finite: {', '.join(f'{k} {n}' for k, n in counts.items() if n)}]"
            )
            out.print(shown(f"  {name}: {_shorten(value)}{beside}"))


def _print_fields(heading: str, fields: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in (heading, "type", "shape", "samples"):
        table.add_column(title)
    for name, summary in fields.items():
        kind = " of ".join(part for part in (summary["type"], summary["dtype"]) if part) or "None"
        count = str(summary["samples"]) + (f" ({summary['none']} None)" if summary["none"] else "")
        table.add_row(shown(name), shown(kind), _shape(summary["shape"]), count)
    console().print(table)


def _shape(shape: dict[str, list[int]] | None) -> str:
    if shape is None:
        return ""
    sides = zip(shape["min"], shape["max"], strict=True)
    return " x ".join(str(low) if low == high else f"{low}…{high}" for low, high in sides)


def _shorten(value: Any, limit: int = 200) -> str:
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}… (--json has all of it)"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG)(inspect)
