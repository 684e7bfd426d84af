"""``slime-instrument report``: one HTML file that answers what is wrong, where, since when and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from slime_instrument._report.build import Report

_EPILOG = "Example: slime-instrument report /data/run7 -o report.html --tokenizer /models/Qwen3-4B"
_SHOWN = 8


def report(
    dumps: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER | ROLLOUT TRAIN...", help="A --dump-details folder, or dumps of both sides."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.html", help="The page to write.")] = Path(
        "report.html"
    ),
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A local tokenizer folder: shows tokens as text.")
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="NAME:PARAMETER=VALUE,VALUE,…", help="Draw what-if's sweep of a correction as a curve."),
    ] = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Compare every rollout with its training and write one self-contained page.

    The page opens from disk without a network. Exit status: 0 written, whatever it says; 2 nothing to report on, or a
    file could not be read: the page is about the others.
    """
    with reporting_errors(as_json=json):
        try:
            import jinja2  # noqa: F401
        except ImportError:
            fail("the report needs jinja2: pip install 'slime-instrument[report]'", as_json=json)
        from slime_instrument._analysis.corrections import parse_sweep
        from slime_instrument._report.build import write_report

        check_output(out)
        with progress("reading") as say:
            written = write_report(
                dumps,
                out,
                tokenizer=tokenizer,
                allow_pickle=allow_pickle,
                sweep=parse_sweep(sweep) if sweep else None,
                progress=say,
            )
        for one in written.skipped[:_SHOWN]:
            note(f"slime_instrument: not used: {one}")
        if len(written.skipped) > _SHOWN:
            note(f"slime_instrument: and {len(written.skipped) - _SHOWN} more files not used")
        if json:
            print_json(written.as_dict())
        else:
            _print(written)
        if any(one.unreadable for one in written.skipped):
            finish(CANNOT_LOOK)


def _print(written: Report) -> None:
    print(written.verdict.text)
    for question, answer, _ in written.verdict.answers:
        print(f"  {question}: {answer}")
    for one in written.left_out:
        print(f"  left out: {one}")
    print(f"{written.path}: {counted(len(written.pairs), 'rollout')}, {written.size / 1e6:.1f} MB")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG)(report)
