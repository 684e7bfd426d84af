"""``slime-instrument audit``: rewards and advantages, worked out again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slime_instrument._cli.output import (
    CANNOT_LOOK,
    WRONG,
    AllowPickle,
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
    from slime_instrument._analysis.audit import Audit
    from slime_instrument._analysis.gradient import Gradient

_EPILOG = (
    "Examples: slime-instrument audit /data/run7; slime-instrument audit rollout_data/0.pt train_data/0.pt "
    "--argument advantage_estimator=grpo --argument n_samples_per_prompt=8 --argument rollout_batch_size=32"
)
_SHOWN = 8
_MOVED = 3


def audit(
    dumps: Annotated[
        list[Path],
        typer.Argument(metavar="FOLDER | ROLLOUT TRAIN...", help="A --dump-details folder, or dumps of both sides."),
    ],
    argument: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An argument of slime's that the dump does not record."),
    ] = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Recompute rewards and advantages as slime does, and look for what should not be in them.

    Exit status: 0 nothing found; 1 something was found; 2 nothing could be looked at, or a file could not be read.
    """
    with reporting_errors(as_json=json), progress("reading") as say:
        from slime_instrument._analysis import audit as analysis
        from slime_instrument._analysis.gradient import loss_gradient
        from slime_instrument._analysis.read_pair import read_pair
        from slime_instrument._format.pairs import find_pairs, no_pairs

        given = _arguments(argument or ())
        pairing = find_pairs(dumps, allow_pickle=allow_pickle)
        if not pairing.pairs:
            raise no_pairs(dumps, pairing, "Nothing was audited.")
        audits: list[tuple[Audit, Gradient]] = []
        for pair in pairing.pairs:
            say(f"{pair.name} ({len(audits) + 1} of {len(pairing.pairs)})")
            both = read_pair(pair, allow_pickle=allow_pickle)
            audits.append((analysis.audit(both, given), loss_gradient(both, given)))
    for left in pairing.skipped:
        note(f"slime_instrument: not used: {left}")
    if json:
        records = [{**one.as_dict(), "gradient": gradient.as_dict()} for one, gradient in audits]
        print_json(records[0] if len(records) == 1 else {"rollouts": records})
    else:
        for one, gradient in audits:
            _print(one)
            _print_gradient(gradient)
    if any(one.findings for one, _ in audits):
        finish(WRONG)
    if pairing.unreadable:
        finish(CANNOT_LOOK)


def _arguments(texts: list[str] | tuple[str, ...]) -> Mapping[str, Any]:
    words = {"true": True, "false": False, "none": None}
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"--argument wants NAME=VALUE; found {text!r}")
        key = name.strip().removeprefix("--").replace("-", "_")
        found[key] = words.get(value.strip().lower(), value.strip())
        for kind in (int, float):
            try:
                found[key] = kind(value)
                break
            except ValueError:
                continue
    return found


def _print(one: Audit) -> None:
    out = console()
    flat = sum(group.without_variance for group in one.groups)
    out.print(f"rollout {one.rollout_id}: {len(one.groups)} groups, {flat} of them with equal rewards throughout")
    out.print(f"  worked out again: {', '.join(one.checked) or 'nothing'}")
    for name, reason in one.unchecked.items():
        out.print(f"  not {name}: {shown(reason)}")
    for finding in one.findings:
        out.print(f"[bold red]{shown(finding.code)}[/] {shown(finding.message)}")
        positions = ", ".join(map(str, finding.samples[:_SHOWN]))
        more = f" … ({len(finding.samples)} in all)" if len(finding.samples) > _SHOWN else ""
        out.print(f"  positions {positions}{more}")
    if not one.findings:
        out.print("[green]no findings[/]")


def _print_gradient(gradient: Gradient) -> None:
    out = console()
    for share in gradient.shares[:_MOVED]:
        out.print(
            f"  moved the model: position {share.position} carries {100 * share.share:.3g} % of its step's "
            f"|∂loss/∂log π|, {share.times_ordinary:.3g} times an equal part"
        )
    for reason, samples in gradient.unknown.items():
        out.print(f"  not in that: {len(samples)} samples: {shown(reason)}")
    for text in gradient.notes:
        out.print(f"  {shown(text)}")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog=_EPILOG)(audit)
