"""``slime-instrument demo``: train on this machine's CPU and see dumps come out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from slime_instrument._cli.output import Json, console, note, print_json, progress, reporting_errors

_EPILOG = "Example: slime-instrument demo --out demo-out --tp 2 --pp 2 --cp 2"


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
        typer.Option(metavar="NAME[:VALUE]", help="Plant a fault, to see its picture; a wrong name lists them."),
    ] = None,
    json: Json = False,
) -> None:
    """Train a tiny model on the CPU under instrumentation, and say what agrees.

    Without any size the layout is DP2 CP2; otherwise every size that is not given is 1.
    """
    with reporting_errors(as_json=json):
        from slime_instrument.lab import default_source
        from slime_instrument.lab.demo import demo as train

        source = slime if slime is not None else default_source()
        with progress("training") as say:
            result = train(out, slime=source, **_layout(tp, pp, cp, dp), rollouts=rollouts, fault=fault, progress=say)
        if result.report is None:
            note(result.report_note)
        if json:
            print_json(_document(result))
        else:
            _print(result)


def _layout(tp: int | None, pp: int | None, cp: int | None, dp: int | None) -> dict[str, int]:
    if tp is pp is cp is dp is None:
        return {"tp": 1, "pp": 1, "cp": 2, "dp": 2}
    return {"tp": tp or 1, "pp": pp or 1, "cp": cp or 1, "dp": dp or 1}


def _document(result: Any) -> dict[str, Any]:
    return {
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


def _print(result: Any) -> None:
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


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG)(demo)
