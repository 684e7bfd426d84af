"""``slime-instrument extract``: a rollout dump of the few samples that matter, for slime to train again."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slime_instrument._cli.output import (
    AllowPickle,
    Json,
    UsageError,
    check_output,
    console,
    counted,
    note,
    print_json,
    progress,
    reporting_errors,
    shown,
)

if TYPE_CHECKING:
    from slime_instrument._extract import Extract

_EPILOG = (
    "Examples: slime-instrument extract rollout_data/12.pt train_data/12.pt --worst 4 -o mini.pt; "
    "slime-instrument extract rollout_data/12.pt --samples 3,17,40-47 -o mini.pt"
)


class SplitBy(str, Enum):
    """What the samples of one file have in common."""

    finding = "finding"
    status = "status"
    reward = "reward"


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
        SplitBy | None, typer.Option(help="One file for each of them, with its name before the suffix.")
    ] = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Write a rollout dump of some samples with their whole groups, and say how slime trains it.

    Exit status: 0 written; 2 nothing written.
    """
    with reporting_errors(as_json=json), progress("reading"):
        from slime_instrument import _extract
        from slime_instrument._analysis.read_pair import read_pair
        from slime_instrument._errors import five_parts
        from slime_instrument._format.pairs import FilePair, find_pairs

        if sum(one is not None for one in (worst, samples, finding)) > 1:
            raise typer.BadParameter("give one of --worst, --samples and --finding")
        if worst is None and samples is None and finding is None and split_by is None:
            raise typer.BadParameter("give --worst, --samples, --finding or --split-by")
        check_output(out)
        if rollout.is_dir() and not train:
            pairing = find_pairs([rollout], allow_pickle=allow_pickle)
            if len(pairing.pairs) != 1:
                ids = ", ".join(str(one.rollout_id) for one in pairing.pairs)
                raise UsageError(
                    five_parts(
                        str(rollout),
                        expected="the dumps of one rollout",
                        found=f"those of rollouts {ids}" if ids else "no pair of dumps",
                        follows="Nothing was written.",
                        next_step="Give the rollout dump and its train dump.",
                    )
                )
            rollout, train = pairing.pairs[0].rollout, list(pairing.pairs[0].train)
        if not train and (worst is not None or finding is not None or split_by is SplitBy.finding):
            raise typer.BadParameter("--worst, --finding and --split-by finding need the train dump as well")
        pair = None
        if train:
            pair = read_pair(FilePair(None, rollout, tuple(train)), allow_pickle=allow_pickle)
        source = _extract.open_source(rollout, pair, allow_pickle=allow_pickle)
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
        return
    for one in written:
        _print(one)


def _print(one: Extract) -> None:
    label = f" ({shown(one.label)})" if one.label else ""
    out = console()
    samples, groups = counted(len(one.positions), "sample"), counted(one.n_groups, "group")
    out.print(f"{shown(one.path)}{label}: {samples} in {groups}, {len(one.chosen)} of them chosen")
    out.print(f"  positions {', '.join(map(str, one.positions))}")
    out.print("  train it with the run's own arguments and these in place of its own:")
    out.print(f"  {shown(one.command)}")
    for warning in one.warnings:
        note(f"slime_instrument: {one.path}: {warning}")


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


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG)(extract)
