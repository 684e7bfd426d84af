"""``slime-instrument status``: settings, arming route, each patch."""

from __future__ import annotations

import typer

from slime_instrument._cli.output import Json, note, print_json, reporting_errors

_EPILOG = "Example: SLIME_INSTRUMENT=1 slime-instrument status --json"


def status(json: Json = False) -> None:
    """Show the settings, how this environment arms, and the state of each patch."""
    with reporting_errors(as_json=json):
        import slime_instrument
        from slime_instrument._installation import advice

        current = slime_instrument.status()
        if json:
            print_json(current.as_dict())
        else:
            print(current)
        missing = advice()
        if missing is not None:
            note(f"slime_instrument: {missing}.")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG)(status)
