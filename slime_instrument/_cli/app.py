"""The ``slime-instrument`` command: collects the commands, each from its own file."""

from __future__ import annotations

import io
import signal
import sys
from typing import Annotated

import typer

from slime_instrument import _switch as switch
from slime_instrument._cli import (
    audit,
    check,
    compare,
    convert,
    demo,
    export,
    extract,
    inspect,
    report,
    run,
    status,
    validate,
    view,
    what_if,
)

__all__ = ["app", "main"]

app = typer.Typer(
    name="slime-instrument",
    help="One aligned train dump per rollout from an unedited slime, and the tools to read it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from slime_instrument import __version__

        print(f"slime-instrument {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


_LOOKING = (status, check, run, demo, inspect, validate, compare, report, view, what_if, audit)
for _module in (*_LOOKING, extract, export, convert):
    _module.register(app)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its status.

    Args:
        arguments: instead of those of the process.
    """
    if switch.is_on() is None:
        # Importing the package armed this process too. It will not train, and `status` tells of the environment.
        switch.cancel()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that is not UTF-8, or half of a surrogate pair from a file, ends no command.
            stream.reconfigure(errors="backslashreplace")
    if arguments is None and sys.argv[1:2] not in (["run"], ["demo"]) and hasattr(signal, "SIGPIPE"):
        # A reader that goes away (`| head`) ends us as it ends other tools. What trains has sockets, and keeps its own.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        app(args=arguments, prog_name="slime-instrument")
    except KeyboardInterrupt:
        sys.exit(130)
