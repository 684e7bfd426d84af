"""``slime-instrument status [FOLDER]``: this environment, or what a run wrote about its own dumps."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slime_instrument._cli.output import FINE, WRONG, Json, note, print_json, reporting_errors

_EPILOG = "Examples: SLIME_INSTRUMENT=1 slime-instrument status --json; slime-instrument status /data/run7"


def status(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder of dumps: answers for its run, also while the job runs.")
    ] = None,
    json: Json = False,
) -> None:
    """Show the settings and patches of this environment; with FOLDER, which rollouts of a run have a dump, and why not.

    Exit status: 1 when a setting has a bad value; with FOLDER 1 when a dump or a field was lost, 2 when it has no
    journal.
    """
    with reporting_errors(as_json=json):
        if folder is not None:
            from slime_instrument._format.journal import read_journal

            journal = read_journal(folder)
            print_json(journal.as_dict()) if json else print(journal)
            raise typer.Exit(FINE if journal.healthy else WRONG)
        import slime_instrument
        from slime_instrument._errors import SettingsError
        from slime_instrument._installation import advice
        from slime_instrument._settings import Settings

        current = slime_instrument.status()
        print_json(current.as_dict()) if json else print(current)
        try:
            unknown = Settings.from_environment().unknown
        except SettingsError as error:
            note(str(error))
            raise typer.Exit(WRONG) from None
        if unknown:
            note(f"slime_instrument: no such setting, ignored: {', '.join(unknown)}")
        missing = advice()
        if missing is not None:
            note(f"slime_instrument: {missing}.")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG)(status)
