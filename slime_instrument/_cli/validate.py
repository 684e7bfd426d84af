"""``slime-instrument validate DUMP…``: is anything wrong with these dumps?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slime_instrument._cli.output import (
    CANNOT_LOOK,
    WRONG,
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

if TYPE_CHECKING:
    from slime_instrument._validate.problems import Problem

_EPILOG = "Example: slime-instrument validate dumps/train_data/0.pt --rollout dumps/rollout_data/0.pt"
_SHOWN_PER_CODE = 10


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

    Exit status 1: something is wrong. 2: a file could not be read; the others are still checked.
    """
    with reporting_errors(as_json=json):
        from slime_instrument._format.pairs import dump_files
        from slime_instrument._validate import validate_files

        if not dump_files(dumps):
            raise UsageError(f"{dumps[0]}: holds no dumps. Nothing was validated.")
        # A folder without dumps is told as what it is beside the others: unreadable.
        files = list(dict.fromkeys(file for path in dumps for file in dump_files([path]) or [path]))
        report = validate_files(files, rollout=rollout, allow_pickle=allow_pickle)
    for problem in report.unreadable:
        note(f"slime_instrument: {problem.message}")
    if json:
        print_json(report.as_dict())
    else:
        _print("error", [problem for problem in report.errors if problem.code != "unreadable"])
        _print("warning", report.warnings)
        looked = len(files) - len(report.unreadable)
        print(
            f"{looked} of {counted(len(files), 'file')} read: "
            f"{counted(len(report.errors) - len(report.unreadable), 'error')}, "
            f"{counted(len(report.warnings), 'warning')}"
        )
    if report.unreadable:
        finish(CANNOT_LOOK)
    if not report.valid:
        finish(WRONG)


def _print(level: str, findings: list[Problem]) -> None:
    out = console()
    colour = {"error": "red", "warning": "yellow"}[level]
    by_code: dict[str, list[Problem]] = {}
    for problem in findings:
        by_code.setdefault(problem.code, []).append(problem)
    for code, group in by_code.items():
        for problem in group[:_SHOWN_PER_CODE]:
            out.print(f"[{colour}]{level}[/] {shown(f'{problem.file}: [{code}] {problem.message}')}")
        if len(group) > _SHOWN_PER_CODE:
            out.print(f"  and {len(group) - _SHOWN_PER_CODE} more of {code} (--json has all of them)")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG)(validate)
