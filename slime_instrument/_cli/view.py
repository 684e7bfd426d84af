"""``slime-instrument view``: the same drill-down in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slime_instrument._cli.output import AllowPickle, fail, reporting_errors

_EPILOG = "Example: slime-instrument view rollout_data/7.pt train_data/7.pt"


def view(
    dumps: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER | ROLLOUT TRAIN...", help="A --dump-details folder, or dumps of both sides."),
    ],
    rollout: Annotated[
        int | None, typer.Option(metavar="ID", help="Which rollout of a folder; the last one otherwise.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A local tokenizer folder: shows tokens as text.")
    ] = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """Look at samples and tokens in the terminal: sort, search, next worst. Keys are shown at the bottom."""
    with reporting_errors():
        try:
            import textual  # noqa: F401
        except ImportError:
            fail("the viewer needs textual: pip install 'slime-instrument[view]'")
        from slime_instrument._view.app import view_dumps

        view_dumps(dumps, rollout=rollout, tokenizer=tokenizer, allow_pickle=allow_pickle)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG)(view)
