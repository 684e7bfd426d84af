"""``slime-instrument run -- CMD…``: the command, armed."""

from __future__ import annotations

from typing import Annotated

import typer

from slime_instrument._cli.output import reporting_errors

_EPILOG = "Example: slime-instrument run -- python train.py --save-debug-train-data dumps/train_data/{rollout_id}.pt"


def run(
    command: Annotated[list[str], typer.Argument(metavar="CMD...", help="What to run, with its arguments.")],
) -> None:
    """Set SLIME_INSTRUMENT=1, say in one line what will be patched, and become the command.

    The exit status is the command's own; 2 if there is no such command.
    """
    with reporting_errors():
        from slime_instrument._activation.launcher import launch

        launch(command)


def register(app: typer.Typer) -> None:
    """Add the command. Options after CMD are the command's, with or without ``--``."""
    app.command(epilog=_EPILOG, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
        run
    )
