"""``slime-instrument check``: would it work with this slime?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slime_instrument._cli.output import WRONG, Json, console, finish, print_json, reporting_errors

_EPILOG = "Example: slime-instrument check --slime ~/src/slime"


def check(
    slime: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A slime checkout; without it the installed slime.")
    ] = None,
    json: Json = False,
) -> None:
    """Probe slime without training: its version, whether it writes v2 dumps itself, and each target's state.

    Exit status 1: some patch is not applicable to this slime.
    """
    with reporting_errors(as_json=json):
        from slime_instrument._activation.check import check as probe

        result = probe(slime)
        document = result.as_dict()
        if json:
            print_json(document)
        else:
            _print(document)
        if not result.applicable:
            finish(WRONG)


def _print(document: dict[str, object]) -> None:
    from rich.markup import escape
    from rich.table import Table

    slime, patches = document["slime"], document["patches"]
    assert isinstance(slime, dict)
    assert isinstance(patches, list)
    out = console()
    native = "writes v2 dumps itself" if slime["native_dump"] else "has no v2 dump of its own"
    out.print(escape(f"slime {slime['version'] or '(version unknown)'} at {slime.get('path')}: {native}"))
    table = Table(box=None, pad_edge=False)
    for heading in ("state", "target", "reason"):
        table.add_column(heading)
    for patch in patches:
        table.add_row(escape(str(patch["state"])), escape(str(patch["target"])), escape(str(patch["reason"] or "")))
    out.print(table)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG)(check)
