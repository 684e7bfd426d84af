"""``slime-instrument convert OLD… -o FILE.pt``: old per-rank dumps of one rollout to one v2 file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slime_instrument._cli.output import AllowPickle, Json, UsageError, note, print_json, progress, reporting_errors

_EPILOG = (
    "Examples: slime-instrument convert train_data/0_*.pt -o 0.pt --rollout rollout_data/0.pt; "
    "slime-instrument convert train_data/0_*.pt -o 0.pt --tp 2 --pp 2 --cp 2"
)
_Size = Annotated[int | None, typer.Option(min=1, metavar="N", help="Size of the run; inferred if left out.")]


def convert(
    old: Annotated[
        list[Path], typer.Argument(metavar="OLD...", help="The per-rank files of one rollout, or a folder of them.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE.pt", help="The v2 file to write.")],
    rollout: Annotated[
        Path | None, typer.Option(metavar="DUMP", help="The rollout dump: proves each sample's position.")
    ] = None,
    tp: _Size = None,
    pp: _Size = None,
    cp: _Size = None,
    dp: _Size = None,
    order: Annotated[
        str | None, typer.Option(metavar="NAMES", help="How ranks are counted, fastest first (tp-cp-dp-pp).")
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


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG)(convert)
