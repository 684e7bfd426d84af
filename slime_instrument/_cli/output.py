"""What all commands share: where output goes, how JSON and tables look, how errors end.

``--json`` puts exactly one JSON document on stdout; everything else goes to stderr. Exit status: 0 no problem;
1 a problem was found; 2 something could not be read.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from slime_instrument._errors import InstrumentError, five_parts

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from slime_instrument._format.pairs import FilePair, Pairing

_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")

WRONG, CANNOT_LOOK = 1, 2
SHOWN = 8
"""Things of one kind that are printed one by one; --json has all of them."""


class UsageError(InstrumentError, ValueError):
    """An option that cannot be used."""


Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else on stderr.")]
AllowPickle = Annotated[
    bool,
    typer.Option("--allow-pickle", help="Read rollout dumps with arbitrary objects. This can run code from the file."),
]
PairedDumps = Annotated[
    list[Path],
    typer.Argument(metavar="FOLDER | ROLLOUT TRAIN...", help="A --dump-details folder, or dumps of both sides."),
]
Tokenizer = Annotated[Path | None, typer.Option(metavar="DIR", help="A local tokenizer folder: shows tokens as text.")]


def console() -> Console:
    """A console on stdout: colours and tables on a terminal, plain and uncut text in a pipe."""
    from rich.console import Console

    # A pipe has no width: without one rich would cut tables at 80 columns.
    return Console(width=None if sys.stdout.isatty() else 10_000, highlight=False, soft_wrap=not sys.stdout.isatty())


def table(*headings: str) -> Table:
    """An empty table without lines."""
    from rich.table import Table

    return Table(*headings, box=None, pad_edge=False)


def shown(value: Any) -> str:
    """A value from a file for :func:`console`: its brackets are no markup, its control characters no commands."""
    from rich.markup import escape

    return escape(_printable(str(value)))


def number(value: Any, digits: int) -> str:
    """So many digits that count; a dash for a missing value."""
    return "-" if value is None else f"{value:.{digits}g}"


def counted(n: int, noun: str) -> str:
    """``1 error``, ``2 errors``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def bar(share: float, width: int) -> str:
    """A bar for a share of 1; a share above 0 is never invisible."""
    full, least = "█", "▏"
    try:
        (full + least).encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        full, least = "#", "."
    return full * round(width * share) or (least if share else "")


def print_finding(code: str, message: str, samples: Sequence[int], where: str = "") -> None:
    """A finding with the rollout positions that show it; ``where`` says where more stands about it."""
    out = console()
    out.print(f"[bold red]{shown(code)}[/] {shown(message)}")
    more = f" … ({len(samples)} in all)" if len(samples) > SHOWN else ""
    out.print(f"  positions {', '.join(map(str, samples[:SHOWN]))}{more}{where}")


def print_json(document: Any) -> None:
    """Print one document as strict JSON: no NaN, no Infinity. What stdout cannot encode is escaped as JSON does it."""
    text = json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False, default=str)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:  # another encoding, or half of a surrogate pair from a file or its name
        text = json.dumps(document, indent=2, allow_nan=False, default=str)
    sys.stdout.write(text + "\n")


def note(text: str) -> None:
    """Say something beside the result."""
    print(_printable(text), file=sys.stderr)


def note_unused(files: Iterable[object]) -> None:
    """Name the files that were given and took no part, each with the reason."""
    for one in files:
        note(f"slime_instrument: not used: {one}")


def pairs_among(dumps: Sequence[Path], *, allow_pickle: bool, follows: str) -> Pairing:
    """The pairs of dumps among files and folders; ``follows``: what is said where there is none.

    Raises:
        DumpFormatError: there is none.
    """
    from slime_instrument._format.pairs import find_pairs, no_pairs

    pairing = find_pairs(dumps, allow_pickle=allow_pickle)
    if not pairing.pairs:
        raise no_pairs(dumps, pairing, follows)
    return pairing


def announced(pairs: Sequence[FilePair], say: Callable[[str], None]) -> Iterator[FilePair]:
    """Each pair, after telling :func:`progress` that it is next."""
    for n, pair in enumerate(pairs, start=1):
        say(f"{pair.name} ({n} of {len(pairs)})")
        yield pair


def check_output(path: Path, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse a file that cannot be what was asked for, or has nowhere to stand, before hours are spent on its content.

    Raises:
        UsageError: another suffix than those given, or no such folder.
    """
    if suffixes and path.suffix not in suffixes:
        found = f"{path.suffix or 'no suffix'}, of which nothing here writes the format"
    elif not path.parent.is_dir():
        found = f"no folder {path.parent}"
    elif path.is_dir():
        found = "a folder"
    else:
        return
    what = f"a file name that ends in {' or '.join(suffixes)}" if suffixes else "a file name"
    raise UsageError(
        five_parts(
            f"-o {path}",
            expected=f"{what}, in a folder that is there",
            found=found,
            follows="Nothing was written.",
            next_step="Name another file, or make the folder.",
        )
    )


def need(module: str, who: str, *, extra: str, as_json: bool = False) -> None:
    """End the command before any file is opened where an optional dependency is not installed."""
    try:
        importlib.import_module(module)
    except ImportError:
        fail(f"{who} needs {module}: install slime-instrument[{extra}]", as_json=as_json)


def finish(code: int) -> NoReturn:
    """End the command with an exit status."""
    raise typer.Exit(code)


def fail(message: str, *, as_json: bool = False) -> NoReturn:
    """End a command that could not look: one line on stderr, and with ``--json`` a document that says so."""
    line = " ".join(message.split())
    note(line if line.startswith("slime_instrument: ") else f"slime_instrument: {line}")
    if as_json:
        print_json({"error": line})
    finish(CANNOT_LOOK)


@contextlib.contextmanager
def reporting_errors(*, as_json: bool = False) -> Iterator[None]:
    """Turn errors that a user can act on into one line and exit status 2. Everything else is a bug and stays loud."""
    try:
        yield
    except InstrumentError as error:
        fail(str(error), as_json=as_json)
    except OSError as error:
        where = f"{error.filename}: " if error.filename is not None else ""
        fail(f"{where}{error.strerror or error}", as_json=as_json)


@contextlib.contextmanager
def progress(start: str) -> Iterator[Callable[[str], None]]:
    """Show what long work is doing on a terminal, on stderr; show nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status(escape(start)) as status:
        yield lambda text: status.update(escape(text))


def _printable(text: str) -> str:
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
