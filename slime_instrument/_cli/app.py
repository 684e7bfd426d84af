"""The ``slime-instrument`` command: its subcommands in the order of ``--help``, each with its examples."""

from __future__ import annotations

import io
import signal
import sys
from typing import Annotated

import typer

from slime_instrument import _switch as switch
from slime_instrument._cli.compare import compare, report, view
from slime_instrument._cli.dumps import convert, export, extract, inspect, validate
from slime_instrument._cli.loss import audit, what_if
from slime_instrument._cli.training import check, demo, run, status

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


app.command(epilog="Examples: SLIME_INSTRUMENT=1 slime-instrument status --json; slime-instrument status /data/run7")(
    status
)
app.command(epilog="Example: slime-instrument check --slime ~/src/slime")(check)
app.command(
    epilog="Example: slime-instrument run -- python train.py --save-debug-train-data dumps/train_data/{rollout_id}.pt",
    # Options after CMD are the command's, with or without ``--``.
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)(run)
app.command(epilog="Example: slime-instrument demo --out demo-out --tp 2 --pp 2 --cp 2")(demo)
app.command(epilog="Example: slime-instrument inspect dumps/train_data/0.pt --sample 3")(inspect)
app.command(epilog="Example: slime-instrument validate dumps/train_data/0.pt --rollout dumps/rollout_data/0.pt")(
    validate
)
app.command(
    epilog="Examples: slime-instrument compare dumps/rollout_data/0.pt dumps/train_data/0.pt "
    "--fail-if 'abs_diff.mean>0.05'; slime-instrument compare /data/run7 (every rollout, as a trend); "
    "slime-instrument compare rollout_data/0.pt train_data/0_*.pt (old per-rank files)"
)(compare)
app.command(epilog="Example: slime-instrument report /data/run7 -o report.html --tokenizer /models/Qwen3-4B")(report)
app.command(epilog="Example: slime-instrument view rollout_data/7.pt train_data/7.pt")(view)
app.command(
    name="what-if",
    epilog="Examples: slime-instrument what-if /data/run7; "
    "slime-instrument what-if /data/run7 --policy slime-icepop:tis_clip_low=0.5,tis_clip=5 --policy trl; "
    "slime-instrument what-if /data/run7 --sweep verl-token-tis:rollout_is_threshold=1.2,1.5,2,3,5",
)(what_if)
app.command(
    epilog="Examples: slime-instrument audit /data/run7; slime-instrument audit rollout_data/0.pt train_data/0.pt "
    "--argument advantage_estimator=grpo --argument n_samples_per_prompt=8 --argument rollout_batch_size=32"
)(audit)
app.command(
    epilog="Examples: slime-instrument extract rollout_data/12.pt train_data/12.pt --worst 4 -o mini.pt; "
    "slime-instrument extract rollout_data/12.pt --samples 3,17,40-47 -o mini.pt"
)(extract)
app.command(
    epilog="Examples: slime-instrument export train_data/0.pt -o 0.parquet --level token; "
    "slime-instrument export train_data -o all.parquet"
)(export)
app.command(
    epilog="Examples: slime-instrument convert train_data/0_*.pt -o 0.pt --rollout rollout_data/0.pt; "
    "slime-instrument convert train_data/0_*.pt -o 0.pt --tp 2 --pp 2 --cp 2"
)(convert)


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
