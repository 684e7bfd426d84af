"""Commands on dump files as such: ``inspect``, ``validate``, ``extract``, ``export`` and ``convert``."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slime_instrument._cli.output import (
    CANNOT_LOOK,
    WRONG,
    AllowPickle,
    Json,
    UsageError,
    check_output,
    console,
    counted,
    finish,
    need,
    note,
    note_unused,
    print_json,
    progress,
    reporting_errors,
    shown,
    table,
)
from slime_instrument._errors import DumpFormatError, five_parts

if TYPE_CHECKING:
    from slime_instrument._extract import Extract
    from slime_instrument._format.pairs import FilePair
    from slime_instrument._validate.problems import Problem

_SHOWN_PER_CODE = 10
_SHOWN_CHARACTERS = 200
_Size = Annotated[int | None, typer.Option(min=1, metavar="N", help="Parallel size of the run; inferred if left out.")]


class Level(str, Enum):
    """What one row of an export is."""

    sample = "sample"
    token = "token"


class SplitBy(str, Enum):
    """What the samples of one extracted file have in common."""

    finding = "finding"
    status = "status"
    reward = "reward"


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
            _inspect_each(dump, sample, allow_pickle=allow_pickle, as_json=json)
            return
        record = inspect_dump(dump, sample=sample, allow_pickle=allow_pickle)
        if json:
            print_json(record)
        else:
            _print_content(record)


def _inspect_each(folder: Path, sample: int | None, *, allow_pickle: bool, as_json: bool) -> None:
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
        except DumpFormatError as error:
            note(f"slime_instrument: {error}")
        except OSError as error:
            note(f"slime_instrument: {file}: {error.strerror or error}")
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


def _print_content(record: dict[str, Any]) -> None:
    from slime_instrument._format.references import ReferenceCounts

    out = console()
    version = f", format version {record['format_version']}" if record["format_version"] is not None else ""
    out.print(shown(f"{record['file']}: {record['kind']}{version}, {record['bytes']} bytes"))
    out.print(f"rollout {record['rollout_id']}, {counted(record['n_samples'], 'sample')}")
    for shard in record["dp_shards"]:
        rank, group = shard.get("rank"), shard.get("data_parallel_rank")
        whose = f"rank {rank}" if group is None else f"data-parallel rank {group}, from rank {rank}"
        out.print(shown(f"  {whose}: {shard['n_samples']} samples"))
    _print_fields("field", record["fields"])
    if record["references"]["total"]:
        out.print(shown(str(ReferenceCounts(**record["references"]))))
    if record["whole_batch"]:
        _print_fields("whole batch", record["whole_batch"])
    if "sample" in record:
        out.print("sample:")
    for name, value in record.get("sample", {}).items():
        text = str(value)
        if len(text) > _SHOWN_CHARACTERS:
            text = f"{text[:_SHOWN_CHARACTERS]}… (--json has all of it)"
        counts = record["sample_non_finite"].get(name)
        if counts is not None:
            text += f"  [not finite: {', '.join(f'{kind} {n}' for kind, n in counts.items() if n)}]"
        out.print(shown(f"  {name}: {text}"))


def _print_fields(heading: str, fields: dict[str, Any]) -> None:
    rows = table(heading, "type", "shape", "samples")
    for name, summary in fields.items():
        kind = " of ".join(part for part in (summary["type"], summary["dtype"]) if part) or "None"
        count = str(summary["samples"]) + (f" ({summary['none']} None)" if summary["none"] else "")
        shape = summary["shape"] or {"min": [], "max": []}
        sides = zip(shape["min"], shape["max"], strict=True)
        sizes = " x ".join(str(low) if low == high else f"{low}…{high}" for low, high in sides)
        rows.add_row(shown(name), shown(kind), sizes, count)
    console().print(rows)


def validate(
    dumps: Annotated[list[Path], typer.Argument(metavar="DUMP...", help="Train dumps (v2 or old) and rollout dumps.")],
    rollout: Annotated[
        Path | None,
        typer.Option(metavar="DUMP", help="The rollout dump of the train dumps, or a folder of them."),
    ] = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Check structure, lengths, order, coverage and schedule; with --rollout also tokens and rewards.

    Exit status 1: a problem was found. 2: a file could not be read; the others are still checked.
    """
    with reporting_errors(as_json=json):
        from slime_instrument._format.pairs import dump_files
        from slime_instrument._validate import validate_files

        if not dump_files(dumps):
            raise UsageError(f"{dumps[0]}: holds no dumps. Nothing was validated.")
        # Beside others, a folder without dumps counts as unreadable.
        files = list(dict.fromkeys(file for path in dumps for file in dump_files([path]) or [path]))
        report = validate_files(files, rollout=rollout, allow_pickle=allow_pickle)
    unreadable = report.unreadable
    for problem in unreadable:
        note(f"slime_instrument: {problem.message}")
    if json:
        print_json(report.as_dict())
    else:
        _print_problems("[red]error[/]", [problem for problem in report.errors if problem.code != "unreadable"])
        _print_problems("[yellow]warning[/]", report.warnings)
        print(
            f"{len(files) - len(unreadable)} of {counted(len(files), 'file')} read: "
            f"{counted(len(report.errors) - len(unreadable), 'error')}, {counted(len(report.warnings), 'warning')}"
        )
    if unreadable:
        finish(CANNOT_LOOK)
    if not report.valid:
        finish(WRONG)


def _print_problems(level: str, problems: list[Problem]) -> None:
    out = console()
    by_code: dict[str, list[Problem]] = {}
    for problem in problems:
        by_code.setdefault(problem.code, []).append(problem)
    for code, group in by_code.items():
        for problem in group[:_SHOWN_PER_CODE]:
            out.print(f"{level} {shown(f'{problem.file}: [{code}] {problem.message}')}")
        if len(group) > _SHOWN_PER_CODE:
            out.print(f"  and {len(group) - _SHOWN_PER_CODE} more of {code} (--json has all of them)")


def extract(
    rollout: Annotated[Path, typer.Argument(metavar="FOLDER | ROLLOUT", help="A rollout dump, or a folder with one.")],
    train: Annotated[
        list[Path] | None, typer.Argument(metavar="[TRAIN...]", help="Its train dump, for --worst and --finding.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.pt", help="The file to write.")] = Path(
        "extract.pt"
    ),
    worst: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="The N samples with the largest mean |δ|.")
    ] = None,
    samples: Annotated[
        str | None, typer.Option(metavar="POSITIONS", help="These rollout positions, such as 3,17,40-47.")
    ] = None,
    finding: Annotated[str | None, typer.Option(metavar="CODE", help="The samples that this finding names.")] = None,
    split_by: Annotated[
        SplitBy | None, typer.Option(help="Write one file per finding, status or reward, and name it after that.")
    ] = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Write a rollout dump of some samples with their whole groups, and say how slime trains it.

    Exit status: 0 written; 2 nothing written.
    """
    with reporting_errors(as_json=json), progress("reading"):
        from slime_instrument import _extract
        from slime_instrument._analysis.pair import read_pair
        from slime_instrument._format.pairs import FilePair

        if sum(one is not None for one in (worst, samples, finding)) > 1:
            raise typer.BadParameter("give one of --worst, --samples and --finding")
        if worst is None and samples is None and finding is None and split_by is None:
            raise typer.BadParameter("give --worst, --samples, --finding or --split-by")
        check_output(out)
        files = FilePair(None, rollout, tuple(train or ()))
        if rollout.is_dir() and not train:
            files = _only_pair(rollout, allow_pickle=allow_pickle)
        if not files.train and (worst is not None or finding is not None or split_by is SplitBy.finding):
            raise typer.BadParameter("--worst, --finding and --split-by finding need the train dump as well")
        pair = read_pair(files, allow_pickle=allow_pickle) if files.train else None
        source = _extract.open_source(files.rollout, pair, allow_pickle=allow_pickle)
        if samples is not None:
            chosen = _positions(samples)
        elif pair is not None and worst is not None:
            chosen = _extract.worst(pair, worst)
        elif pair is not None and finding is not None:
            chosen = _extract.with_finding(pair, finding)
        else:
            chosen = list(range(len(source.samples)))
        if split_by is None:
            written = [_extract.extract(source, chosen, out)]
        else:
            parts = _extract.split(source, split_by.value, chosen)
            written = [_extract.extract(source, found, _named(out, label), label) for label, found in parts.items()]
    if json:
        print_json(written[0].as_dict() if split_by is None else {"files": [one.as_dict() for one in written]})
    else:
        for one in written:
            _print_extract(one)


def _only_pair(folder: Path, *, allow_pickle: bool) -> FilePair:
    from slime_instrument._format.pairs import find_pairs

    pairs = find_pairs([folder], allow_pickle=allow_pickle).pairs
    if len(pairs) == 1:
        return pairs[0]
    ids = ", ".join(str(one.rollout_id) for one in pairs)
    raise UsageError(
        five_parts(
            str(folder),
            expected="the dumps of one rollout",
            found=f"those of rollouts {ids}" if ids else "no pair of dumps",
            follows="Nothing was written.",
            next_step="Give the rollout dump and its train dump.",
        )
    )


def _positions(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if match is None:
            raise typer.BadParameter(f"--samples wants positions such as 3,17,40-47; found {text!r}")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def _named(out: Path, label: str) -> Path:
    return out.with_name(f"{out.stem}-{re.sub(r'[^A-Za-z0-9._-]+', '_', label)[:40]}{out.suffix}")


def _print_extract(one: Extract) -> None:
    label = f" ({shown(one.label)})" if one.label else ""
    out = console()
    samples, groups = counted(len(one.positions), "sample"), counted(one.n_groups, "group")
    out.print(f"{shown(one.path)}{label}: {samples} in {groups}, {len(one.chosen)} of them chosen")
    out.print(f"  positions {', '.join(map(str, one.positions))}")
    out.print("  to train on it, replace these arguments of the run:")
    out.print(f"  {shown(one.command)}")
    for warning in one.warnings:
        note(f"slime_instrument: {one.path}: {warning}")


def export(
    dumps: Annotated[list[Path], typer.Argument(metavar="DUMP...", help="Dumps, or folders of dumps.")],
    output: Annotated[Path, typer.Option("--out", "-o", "--output", metavar="FILE.parquet", help="The file to write.")],
    level: Annotated[Level, typer.Option(help="One row per sample or per response token.")] = Level.sample,
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Write dumps as one Parquet table with a stable, versioned schema.

    Exit status 2: a file could not be read; the others are in the table.
    """
    need("polars", "export", extra="analysis", as_json=json)
    with reporting_errors(as_json=json), progress("exporting"):
        from slime_instrument._analysis.export import SCHEMA_VERSION
        from slime_instrument._analysis.export import export as write

        check_output(output, (".parquet", ".pq"))
        unreadable: list[Exception] = []
        n = write(dumps, output, level=level.value, allow_pickle=allow_pickle, on_unreadable=unreadable.append)
    note_unused(unreadable)
    if json:
        print_json({"output": str(output), "level": level.value, "n_rows": n, "schema_version": SCHEMA_VERSION})
    else:
        print(f"{output}: {counted(n, 'row')}, one per {level.value}, schema version {SCHEMA_VERSION}")
    if unreadable:
        finish(CANNOT_LOOK)


def convert(
    old: Annotated[
        list[Path], typer.Argument(metavar="OLD...", help="The per-rank files of one rollout, or a folder of them.")
    ],
    output: Annotated[Path, typer.Option("--out", "-o", "--output", metavar="FILE.pt", help="The v2 file to write.")],
    rollout: Annotated[
        Path | None, typer.Option(metavar="DUMP", help="The rollout dump: proves each sample's position.")
    ] = None,
    tp: _Size = None,
    pp: _Size = None,
    cp: _Size = None,
    dp: _Size = None,
    order: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Parallel groups, innermost first (tp-cp-dp-pp).")
    ] = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Convert old per-rank train dumps to one v2 file. The layout is given, or inferred from the files and proven.

    Exit status 2: a file could not be read, or the layout is not proven; nothing is written then.
    """
    with reporting_errors(as_json=json), progress("converting"):
        from slime_instrument._convert import convert_files
        from slime_instrument._format.pairs import dump_files

        files = dump_files(old)
        if not files:
            raise UsageError(f"{old[0]}: holds no dumps. Nothing was converted.")
        converted = convert_files(
            files, output, rollout=rollout, allow_pickle=allow_pickle, tp=tp, pp=pp, cp=cp, dp=dp, order=order
        )
    if json:
        print_json({**converted.as_dict(), "output": str(output)})
        return
    for warning in converted.warnings:
        note(f"slime_instrument: warning: {warning}")
    layout = converted.layout
    print(
        f"{output}: {len(converted.payload['samples'])} samples from {len(converted.dump.paths)} files "
        f"(tp {layout.tp}, pp {layout.pp}, cp {layout.cp}, dp {layout.dp}, {layout.how})"
    )
