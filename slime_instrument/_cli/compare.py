"""``slime-instrument compare ROLLOUT TRAIN…``: what the engine sampled against what training computed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slime_instrument._cli.output import (
    WRONG,
    AllowPickle,
    Json,
    finish,
    print_json,
    progress,
    reporting_errors,
)

if TYPE_CHECKING:
    from slime_instrument._analysis.compare import Comparison
    from slime_instrument._analysis.thresholds import Threshold

_EPILOG = (
    "Examples: slime-instrument compare dumps/rollout_data/0.pt dumps/train_data/0.pt --fail-above abs_diff.mean=0.05; "
    "slime-instrument compare dumps/rollout_data dumps/train_data (every rollout, as a trend); "
    "slime-instrument compare rollout_data/0.pt train_data/0_*.pt (old per-rank files)"
)


def compare(
    rollout: Annotated[Path, typer.Argument(metavar="ROLLOUT", help="A rollout dump, or a folder of them.")],
    train: Annotated[
        list[Path], typer.Argument(metavar="TRAIN...", help="Train dumps: v2, old per-rank files, or a folder.")
    ],
    fail_above: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC=VALUE", help="Exit 1 if the metric is above. Names as in --json, with dots."),
    ] = None,
    field: Annotated[
        str, typer.Option(help="Train field to compare, such as ref_log_probs or the train side's rollout_log_probs.")
    ] = "log_probs",
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Join by position, confirm by tokens, measure the mismatch, name its cause.

    Exit status 1: something was found, or a threshold was passed. 2: a file could not be read.
    """
    with reporting_errors(as_json=json), progress("reading") as say:
        from slime_instrument._analysis import compare as analysis
        from slime_instrument._analysis.thresholds import parse_threshold, passed
        from slime_instrument._analysis.trend import pair_files, trend

        thresholds = [parse_threshold(text) for text in fail_above or ()]
        comparisons: list[Comparison] = []
        pairs = pair_files(rollout, train, allow_pickle=allow_pickle)
        for pair in pairs:
            say(f"comparing {pair.rollout.name} ({len(comparisons) + 1} of {len(pairs)})")
            sources = pair.train[0] if len(pair.train) == 1 else pair.train
            comparisons.append(analysis.compare(pair.rollout, sources, allow_pickle=allow_pickle, field=field))
        above = [passed(one, thresholds) for one in comparisons]
    if json:
        records = [{**one, "passed_thresholds": over} for one, over in zip(comparisons, above, strict=True)]
        print_json(records[0] if len(records) == 1 else {"pairs": records, "trend": trend(comparisons)})
    else:
        _print_all(comparisons, above, thresholds)
    if any(above) or not all(one.clean for one in comparisons):
        finish(WRONG)


def _print_all(comparisons: list[Comparison], above: list[list[dict[str, Any]]], thresholds: list[Threshold]) -> None:
    from slime_instrument._cli.mismatch import print_comparison, print_trend

    if len(comparisons) > 1:
        print_trend(comparisons)
    for one, over in zip(comparisons, above, strict=True):
        if len(comparisons) == 1 or over or not one.clean:
            print_comparison(one, over, thresholds)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG)(compare)
