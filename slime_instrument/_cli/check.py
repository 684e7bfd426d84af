"""``slime-instrument check``: would it work with this slime?"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slime_instrument._cli.output import WRONG, Json, console, finish, print_json, reporting_errors, shown

if TYPE_CHECKING:
    from slime_instrument._activation.check import CheckResult

_WIDTH = 118
_NARROWEST = 20
_EPILOG = "Example: slime-instrument check --slime ~/src/slime"


def check(
    slime: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A slime checkout; else $SLIME_SOURCE, or the installed slime.")
    ] = None,
    json: Json = False,
) -> None:
    """Probe slime without training: whether train dumps will be written with it, who captures their log-probs, and
    the state of each patch.

    Exit status 1: no v2 train dump would be written.
    """
    with reporting_errors(as_json=json):
        from slime_instrument._activation.check import check as probe

        result = probe(slime)
        if json:
            print_json(result.as_dict())
        else:
            _print(result)
        if not result.dumps_written:
            finish(WRONG)


def _print(result: CheckResult) -> None:
    out = console()
    out.print(shown(result.verdict))
    native = "writes v2 dumps itself" if result.native_dump else "has no v2 dump of its own"
    width = min(_WIDTH, out.width)
    for line in _wrapped(f"slime {result.version or '(version unknown)'} at {result.path}: {native}", width):
        out.print(shown(line))
    states = max(len(patch.state) for patch in result.patches)
    names = max(len(patch.name) for patch in result.patches)
    for patch in result.patches:
        start = f"{patch.state:{states}}  {patch.name:{names}}  "
        about = patch.reason if patch.state == "INCOMPATIBLE" else f"{patch.target}: {patch.reason}"
        for number, line in enumerate(_wrapped(about, max(width - len(start), _NARROWEST))):
            out.print(shown((" " * len(start) if number else start) + line), soft_wrap=True)


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of at most ``width``; a path or a name longer than that stays whole."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG)(check)
