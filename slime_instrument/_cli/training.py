"""Commands about training itself: ``status``, ``check``, ``run`` and ``demo``."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slime_instrument._cli.output import (
    WRONG,
    Json,
    console,
    finish,
    note,
    print_json,
    progress,
    reporting_errors,
    shown,
)

if TYPE_CHECKING:
    from slime_instrument._activation.check import CheckResult

_WIDTH = 118
_NARROWEST = 20


def status(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder of dumps: shows what its run wrote, also while the job runs.")
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
            finish(0 if journal.healthy else WRONG)
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
            finish(WRONG)
        if unknown:
            note(f"slime_instrument: ignored unknown settings: {', '.join(unknown)}")
        missing = advice()
        if missing is not None:
            note(f"slime_instrument: {missing}.")


def check(
    slime: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A slime checkout; else $SLIME_SOURCE, or the installed slime.")
    ] = None,
    json: Json = False,
) -> None:
    """Read slime's source, without training: whether train dumps will be written, whether slime or this package
    provides their log-probs, and the state of each patch.

    Exit status 1: no v2 train dump would be written.
    """
    with reporting_errors(as_json=json):
        from slime_instrument._activation.check import check as probe

        result = probe(slime)
        if json:
            print_json(result.as_dict())
        else:
            _print_check(result)
        if not result.dumps_written:
            finish(WRONG)


def _print_check(result: CheckResult) -> None:
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


def run(
    command: Annotated[list[str], typer.Argument(metavar="CMD...", help="What to run, with its arguments.")],
) -> None:
    """Set SLIME_INSTRUMENT=1, say in one line what will be patched, and replace this process with the command.

    The exit status is the command's own; 2 if there is no such command.
    """
    with reporting_errors():
        from slime_instrument._activation.launcher import launch

        launch(command)


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for rollout_data/, train_data/ and report.html.")],
    slime: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A slime checkout; else $SLIME_SOURCE, an installed slime, or the bundled miniature."
        ),
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tensor-parallel size.")] = None,
    pp: Annotated[int | None, typer.Option(min=1, metavar="N", help="Pipeline-parallel size.")] = None,
    cp: Annotated[int | None, typer.Option(min=1, metavar="N", help="Context-parallel size.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, metavar="N", help="Data-parallel size.")] = None,
    rollouts: Annotated[int, typer.Option(min=1, metavar="N", help="Rollouts to train.")] = 2,
    fault: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:VALUE]",
            help="Inject a fault, to see how the report shows it: stale-weights, temperature, sample-swap, mask-shift.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Train a tiny model on the CPU under instrumentation, and compare its log-probs with those of a single process.

    Without any size the layout is DP2 CP2; otherwise every size that is not given is 1.
    """
    with reporting_errors(as_json=json):
        from slime_instrument.lab import default_source
        from slime_instrument.lab.demo import demo as train

        source = slime if slime is not None else default_source()
        sizes = {"tp": tp or 1, "pp": pp or 1, "cp": cp or 1, "dp": dp or 1}
        if tp is pp is cp is dp is None:
            sizes |= {"cp": 2, "dp": 2}
        with progress("training") as say:
            result = train(out, slime=source, **sizes, rollouts=rollouts, fault=fault, progress=say)
        if result.report is None:
            note(result.report_note)
        if json:
            print_json(
                {
                    "target": result.target,
                    "slime_version": result.slime_version,
                    "layout": result.layout,
                    "train_dumps": [str(path) for path in result.train_dumps],
                    "rollout_dumps": [str(path) for path in result.rollout_dumps],
                    "report": None if result.report is None else str(result.report),
                    "verdict": result.report_note,
                    "patches": list(result.patches),
                    "agreement": result.agreement,
                    "seconds": result.seconds["total"],
                    "seconds_by_part": result.seconds,
                }
            )
        else:
            _print_demo(result)


def _print_demo(result: Any) -> None:
    from rich.markup import escape

    out = console()
    ran = f"real slime {result.slime_version or ''}".strip() if result.target == "slime" else "the bundled miniature"
    layout = " ".join(f"{name.upper()}{size}" for name, size in result.layout.items())
    out.print(escape(f"Trained {ran} on the CPU, {layout}, in {result.seconds['total']:.1f} s."))
    for path in (*result.train_dumps, *result.rollout_dumps):
        out.print(escape(f"  {path}"))
    agreement = result.agreement
    out.print(f"{agreement['n_samples']} samples, {agreement['n_tokens']} trained tokens; log-probs differ by")
    if "layout_max_abs_diff" in agreement:
        out.print(f"  {agreement['layout_max_abs_diff']:.2g} at most between this layout and a single process")
    out.print(f"  {agreement['rollout_mean_abs_diff']:.2g} on average between rollout and training")
    out.print(escape(f"The rollout's log-probs: {agreement['rollout_log_probs']}."))
    if result.report is not None:
        out.print(escape(f"Report: {result.report} ({result.report_note})"))
