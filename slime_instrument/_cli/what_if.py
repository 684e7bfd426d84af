"""``slime-instrument what-if``: what each framework's correction of the mismatch would do to these tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slime_instrument._cli.output import (
    CANNOT_LOOK,
    AllowPickle,
    Json,
    bar,
    console,
    finish,
    note,
    print_json,
    progress,
    reporting_errors,
    shown,
)

if TYPE_CHECKING:
    from slime_instrument._analysis.corrections import Policy
    from slime_instrument._analysis.what_if import Effect, WhatIf

_EPILOG = (
    "Examples: slime-instrument what-if /data/run7; "
    "slime-instrument what-if /data/run7 --policy slime-icepop:tis_clip_low=0.5,tis_clip=5 --policy trl; "
    "slime-instrument what-if /data/run7 --sweep verl-token-tis:rollout_is_threshold=1.2,1.5,2,3,5"
)
_BAR = 30


def what_if(
    dumps: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FOLDER | ROLLOUT TRAIN...", help="A --dump-details folder, or dumps of both sides."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:PARAMETER=VALUE,…]", help="Only this one, with its splits. May be repeated."),
    ] = None,
    sweep: Annotated[
        str | None, typer.Option(metavar="NAME:PARAMETER=VALUE,VALUE,…", help="One policy at several thresholds.")
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="Show every policy with its framework and parameters.")
    ] = False,
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Try the corrections of ten frameworks, with their exact formulas and defaults, on the tokens of a dump.

    Exit status: 0 tried; 2 nothing to try them on, or a file could not be read.
    """
    with reporting_errors(as_json=json):
        from slime_instrument._analysis.corrections import PRESETS, parse_policy, parse_sweep

        if list_all:
            _print_list(list(PRESETS.values()), as_json=json)
            return
        if not dumps:
            raise typer.BadParameter("needs dumps: a --dump-details folder, or the dumps of both sides")
        swept = parse_sweep(sweep) if sweep else None
        chosen = [*map(parse_policy, policy or ()), *(swept.policies if swept else ())]
        result, skipped = _try(dumps, chosen or list(PRESETS.values()), allow_pickle)
    for one in skipped:
        note(f"slime_instrument: not used: {one['file']}: {one['reason']}")
    if json:
        print_json({**result.as_dict(), "skipped_files": skipped})
    elif swept and not policy:
        _print_sweep(result, swept.parameter)
    else:
        _print_table(result)
        for effect in result.effects if chosen else ():
            _print_splits(effect)
    if any(one["unreadable"] for one in skipped):
        finish(CANNOT_LOOK)


def _try(dumps: list[Path], policies: Sequence[Policy], allow_pickle: bool) -> tuple[WhatIf, list[dict[str, Any]]]:
    from slime_instrument._analysis.read_pair import read_pair
    from slime_instrument._analysis.what_if import rollout_of
    from slime_instrument._analysis.what_if import what_if as analysis
    from slime_instrument._format.pairs import find_pairs, no_pairs

    with progress("reading") as say:
        pairing = find_pairs(dumps, allow_pickle=allow_pickle)
        if not pairing.pairs:
            raise no_pairs(dumps, pairing, "Nothing was tried.")

        def rollouts() -> Any:
            for n, pair in enumerate(pairing.pairs):
                say(f"{pair.name} ({n + 1} of {len(pairing.pairs)})")
                yield rollout_of(read_pair(pair, allow_pickle=allow_pickle))

        result = analysis(rollouts(), policies)
    return result, [{**one.as_dict(), "unreadable": one.unreadable} for one in pairing.skipped]


def _print_list(policies: Sequence[Policy], *, as_json: bool) -> None:
    if as_json:
        print_json(
            [{"name": one.name, "framework": one.framework, "parameters": dict(one.parameters)} for one in policies]
        )
        return
    from slime_instrument._analysis.corrections import shown_value

    table = _table("policy", "framework", "parameters")
    for one in policies:
        parameters = ", ".join(f"{key}={shown_value(value)}" for key, value in one.parameters.items())
        table.add_row(one.name, one.framework + (" (on by default)" if one.on_by_default else ""), parameters)
    console().print(table)


def _print_table(result: WhatIf) -> None:
    from slime_instrument._analysis.corrections import label

    table = _table(
        "policy",
        "framework",
        "tokens dropped",
        "sequences dropped",
        "tokens clipped",
        "mean weight",
        "ess",
        "|A·w| kept",
    )
    for effect in result.effects:
        total = effect.total
        table.add_row(
            label(effect.policy),
            effect.policy.framework,
            _share(total.tokens_dropped, total.n_tokens),
            _share(total.sequences_dropped, total.n_sequences),
            _share(total.tokens_clipped, total.n_tokens),
            _number(total.mean_weight),
            _number(total.ess),
            _number(total.advantage_kept),
        )
    out = console()
    out.print(table)
    if result.effects:
        total = result.effects[0].total
        left = f"; {result.left_out} lack a value on one side and are left out" if result.left_out else ""
        out.print(f"{total.n_tokens} tokens of {total.n_sequences} sequences{left}")
    for effect in result.effects:
        if effect.total.tokens_not_finite:
            out.print(
                f"[bold red]{shown(effect.policy.name)}[/] gives {effect.total.tokens_not_finite} tokens a weight "
                "that is NaN or infinite: the loss would be, too"
            )
    for name, reason in result.skipped.items():
        out.print(f"{shown(name)} not tried: {shown(reason)}")


def _print_splits(effect: Effect) -> None:
    from slime_instrument._analysis.corrections import label

    out = console()
    out.print(f"\n{shown(label(effect.policy))}")
    table = _table("by", "group", "tokens", "dropped", "clipped", "mean weight", "|A·w| kept")
    for by, groups in effect.splits.items():
        for name, tally in groups.items():
            table.add_row(
                by,
                name,
                str(tally.n_tokens),
                _share(tally.tokens_dropped, tally.n_tokens),
                _share(tally.tokens_clipped, tally.n_tokens),
                _number(tally.mean_weight),
                _number(tally.advantage_kept),
            )
    if len(effect.rollouts) > 1:
        for rollout_id, tally, _ in effect.rollouts:
            table.add_row(
                "rollout",
                str(rollout_id),
                str(tally.n_tokens),
                _share(tally.tokens_dropped, tally.n_tokens),
                _share(tally.tokens_clipped, tally.n_tokens),
                _number(tally.mean_weight),
                _number(tally.advantage_kept),
            )
    out.print(table)


def _print_sweep(result: WhatIf, parameter: str) -> None:
    from slime_instrument._analysis.corrections import shown_value

    table = _table(parameter, "dropped or clipped", "", "mean weight", "ess", "|A·w| kept")
    for effect in result.effects:
        total = effect.total
        touched = total.tokens_dropped + total.tokens_clipped
        table.add_row(
            shown_value(effect.policy.parameters[parameter]),
            _share(touched, total.n_tokens),
            bar(touched / total.n_tokens, _BAR) if total.n_tokens else "",
            _number(total.mean_weight),
            _number(total.ess),
            _number(total.advantage_kept),
        )
    console().print(table)


def _table(*headings: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading)
    return table


def _share(part: int, whole: int) -> str:
    if not part:
        return "0"
    return f"{part} ({100 * part / whole:.3g} %)"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(name="what-if", epilog=_EPILOG)(what_if)
