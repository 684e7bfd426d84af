"""Commands about what training makes of the tokens: ``audit`` and ``what-if``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slime_instrument._cli.output import (
    CANNOT_LOOK,
    WRONG,
    AllowPickle,
    Json,
    PairedDumps,
    announced,
    bar,
    console,
    finish,
    note_unused,
    number,
    pairs_among,
    print_finding,
    print_json,
    progress,
    reporting_errors,
    shown,
    table,
)

if TYPE_CHECKING:
    from slime_instrument._analysis.audit import Audit
    from slime_instrument._analysis.corrections import Policy
    from slime_instrument._analysis.gradient import Gradient
    from slime_instrument._analysis.what_if import Effect, Tally, WhatIf

_MOVED = 3
_BAR = 30
_DIGITS = 4


def audit(
    dumps: PairedDumps,
    argument: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A training argument that the dump does not record."),
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
        from slime_instrument._analysis.pair import read_pair

        given = _arguments(argument or ())
        pairing = pairs_among(dumps, allow_pickle=allow_pickle, follows="Nothing was audited.")
        audits: list[tuple[Audit, Gradient]] = []
        for pair in announced(pairing.pairs, say):
            both = read_pair(pair, allow_pickle=allow_pickle)
            audits.append((analysis.audit(both, given), loss_gradient(both, given)))
    note_unused(pairing.skipped)
    if json:
        records = [{**one.as_dict(), "gradient": gradient.as_dict()} for one, gradient in audits]
        print_json(records[0] if len(records) == 1 else {"rollouts": records})
    else:
        for one, gradient in audits:
            _print_audit(one, gradient)
    if pairing.unreadable:
        finish(CANNOT_LOOK)
    if any(one.findings for one, _ in audits):
        finish(WRONG)


def _arguments(texts: Sequence[str]) -> Mapping[str, Any]:
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


def _print_audit(one: Audit, gradient: Gradient) -> None:
    out = console()
    flat = sum(group.without_variance for group in one.groups)
    out.print(f"rollout {one.rollout_id}: {len(one.groups)} groups, {flat} of them with equal rewards throughout")
    out.print(f"  recomputed: {', '.join(one.checked) or 'nothing'}")
    for name, reason in one.unchecked.items():
        out.print(f"  not checked: {name} ({shown(reason)})")
    for finding in one.findings:
        print_finding(finding.code, finding.message, finding.samples)
    if not one.findings:
        out.print("[green]no findings[/]")
    for share in gradient.shares[:_MOVED]:
        out.print(
            f"  moved the model: position {share.position} carries {100 * share.share:.3g} % of its step's "
            f"|∂loss/∂log π|, {share.times_ordinary:.3g} times an equal part"
        )
    for reason, samples in gradient.unknown.items():
        out.print(f"  not included: {len(samples)} samples: {shown(reason)}")
    for text in gradient.notes:
        out.print(f"  {shown(text)}")


def what_if(
    dumps: Annotated[
        list[Path] | None,
        typer.Argument(metavar="FOLDER | ROLLOUT TRAIN...", help="A --dump-details folder, or dumps of both sides."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:PARAMETER=VALUE,…]", help="Only this one, shown by group. May be repeated."),
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
        from slime_instrument._analysis import what_if as analysis
        from slime_instrument._analysis.corrections import PRESETS, parse_policy, parse_sweep
        from slime_instrument._analysis.pair import read_pair

        if list_all:
            _print_list(list(PRESETS.values()), as_json=json)
            return
        if not dumps:
            raise typer.BadParameter("needs dumps: a --dump-details folder, or the dumps of both sides")
        swept = parse_sweep(sweep) if sweep else None
        chosen = [*map(parse_policy, policy or ()), *(swept.policies if swept else ())]
        with progress("reading") as say:
            pairing = pairs_among(dumps, allow_pickle=allow_pickle, follows="Nothing was tried.")
            pairs = (read_pair(pair, allow_pickle=allow_pickle) for pair in announced(pairing.pairs, say))
            result = analysis.what_if(map(analysis.rollout_of, pairs), chosen or list(PRESETS.values()))
    note_unused(pairing.skipped)
    if json:
        skipped = [{**one.as_dict(), "unreadable": one.unreadable} for one in pairing.skipped]
        print_json({**result.as_dict(), "skipped_files": skipped})
    elif swept and not policy:
        _print_sweep(result, swept.parameter)
    else:
        _print_effects(result)
        for effect in result.effects if chosen else ():
            _print_splits(effect)
    if pairing.unreadable:
        finish(CANNOT_LOOK)


def _print_list(policies: Sequence[Policy], *, as_json: bool) -> None:
    if as_json:
        print_json(
            [{"name": one.name, "framework": one.framework, "parameters": dict(one.parameters)} for one in policies]
        )
        return
    from slime_instrument._analysis.corrections import shown_value

    rows = table("policy", "framework", "parameters")
    for one in policies:
        parameters = ", ".join(f"{key}={shown_value(value)}" for key, value in one.parameters.items())
        rows.add_row(one.name, one.framework + (" (on by default)" if one.on_by_default else ""), parameters)
    console().print(rows)


def _print_effects(result: WhatIf) -> None:
    from slime_instrument._analysis.corrections import label

    headings = ("tokens dropped", "sequences dropped", "tokens clipped", "mean weight", "ess", "|A·w| kept")
    rows = table("policy", "framework", *headings)
    for effect in result.effects:
        total = effect.total
        rows.add_row(
            label(effect.policy),
            effect.policy.framework,
            _share(total.tokens_dropped, total.n_tokens),
            _share(total.sequences_dropped, total.n_sequences),
            _share(total.tokens_clipped, total.n_tokens),
            *_weights(total),
        )
    out = console()
    out.print(rows)
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

    groups = [(by, name, tally) for by, parts in effect.splits.items() for name, tally in parts.items()]
    if len(effect.rollouts) > 1:
        groups += [("rollout", str(rollout_id), tally) for rollout_id, tally, _ in effect.rollouts]
    rows = table("by", "group", "tokens", "dropped", "clipped", "mean weight", "|A·w| kept")
    for by, name, tally in groups:
        n, (mean_weight, _, kept) = tally.n_tokens, _weights(tally)
        rows.add_row(
            by, name, str(n), _share(tally.tokens_dropped, n), _share(tally.tokens_clipped, n), mean_weight, kept
        )
    out = console()
    out.print(f"\n{shown(label(effect.policy))}")
    out.print(rows)


def _print_sweep(result: WhatIf, parameter: str) -> None:
    from slime_instrument._analysis.corrections import shown_value

    rows = table(parameter, "dropped or clipped", "", "mean weight", "ess", "|A·w| kept")
    for effect in result.effects:
        total = effect.total
        touched = total.tokens_dropped + total.tokens_clipped
        rows.add_row(
            shown_value(effect.policy.parameters[parameter]),
            _share(touched, total.n_tokens),
            bar(touched / total.n_tokens, _BAR) if total.n_tokens else "",
            *_weights(total),
        )
    console().print(rows)


def _share(part: int, whole: int) -> str:
    return f"{part} ({100 * part / whole:.3g} %)" if part else "0"


def _weights(tally: Tally) -> tuple[str, str, str]:
    """Mean weight, effective sample size and the share of \\|A\\| that is kept."""
    return (
        number(tally.mean_weight, _DIGITS), number(tally.ess, _DIGITS), number(tally.advantage_kept, _DIGITS)
    )  # fmt: skip
