"""Commands about the mismatch of two sides: ``compare``, and its two pictures ``report`` and ``view``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slime_instrument._cli.output import (
    CANNOT_LOOK,
    SHOWN,
    WRONG,
    AllowPickle,
    Json,
    PairedDumps,
    Tokenizer,
    UsageError,
    announced,
    bar,
    check_output,
    console,
    counted,
    finish,
    need,
    note,
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
from slime_instrument._errors import five_parts
from slime_instrument._thresholds import COUNTS, METRICS, Threshold, Thresholds, parse_threshold, shown_value

if TYPE_CHECKING:
    from slime_instrument._analysis.compare import Comparison
    from slime_instrument._analysis.verdict import Verdict
    from slime_instrument._report.build import Report

_EDGES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
_BAR = 40


class FailOn(str, Enum):
    """The mildest verdict that fails a comparison."""

    fault = "fault"
    unexplained = "unexplained"
    nothing_compared = "nothing-compared"
    never = "never"


class Annotations(str, Enum):
    """Forms that CI systems read."""

    github = "github"
    junit = "junit"


def compare(
    rollout: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER | ROLLOUT", help="A --dump-details folder, a rollout dump, or a folder of them."
        ),
    ],
    train: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[TRAIN...]", help="Train dumps: v2, old per-rank files, or a folder."),
    ] = None,
    fail_above: Annotated[
        list[str] | None,
        typer.Option(
            "--fail-above",
            "--fail-if",
            metavar="METRIC>VALUE",
            help=f"Exit 1 if METRIC is above VALUE (METRIC<VALUE: below). Metrics: {', '.join(METRICS)}; "
            f"counts: {', '.join(COUNTS)}.",
        ),
    ] = None,
    field: Annotated[
        str, typer.Option(help="Train field to compare, such as ref_log_probs or the train side's rollout_log_probs.")
    ] = "log_probs",
    fail_on: Annotated[
        FailOn,
        typer.Option(
            help="Exit 1 for this verdict or a worse one. If nothing was compared, exit 2, or 1 with nothing-compared."
        ),
    ] = FailOn.unexplained,
    annotations: Annotated[
        Annotations | None,
        typer.Option(help="Also write the verdicts for a CI system: github to stderr, junit to --annotations-file."),
    ] = None,
    annotations_file: Annotated[
        Path, typer.Option(metavar="FILE.xml", help="Where --annotations junit writes.")
    ] = Path("slime-instrument.xml"),
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Compare rollout and train log-probs: join the samples, measure the mismatch, name its cause.

    The last line is the verdict. Exit status 1: the verdict is as bad as --fail-on says, or a --fail-if is true.
    2: nothing could be compared, or a file could not be read.
    """
    with reporting_errors(as_json=json), progress("reading") as say:
        from slime_instrument._analysis import compare as analysis
        from slime_instrument._analysis.gradient import loss_gradient, spikes, step_norms
        from slime_instrument._analysis.trend import trend
        from slime_instrument._analysis.verdict import fails, judge_all

        thresholds = _thresholds(fail_above or ())
        if annotations is Annotations.junit:
            check_output(annotations_file)
        pairing = pairs_among([rollout, *(train or ())], allow_pickle=allow_pickle, follows="Nothing was compared.")
        comparisons = [
            analysis.compare(pair.rollout, pair.train, allow_pickle=allow_pickle, field=field)
            for pair in announced(pairing.pairs, say)
        ]
        broken = [thresholds.broken(one.value) for one in comparisons]
        names = [pair.name for pair in pairing.pairs]
        overall = judge_all([one.verdict for one in comparisons], names)
        norms = [step_norms(one.train_dump.provenance) for one in comparisons]
        standing_out = spikes(norms, names, lambda i: loss_gradient(comparisons[i].pair))
    note_unused(pairing.skipped)
    if json:
        records = [
            {**one.as_dict(), "passed_thresholds": [_passed(one, limit) for limit in over]}
            for one, over in zip(comparisons, broken, strict=True)
        ]
        together = {"pairs": records, "trend": trend(comparisons), "verdict": overall.as_dict()}
        document = records[0] if len(records) == 1 else together
        print_json({**document, "gradient_spikes": [one.as_dict() for one in standing_out]})
    else:
        if len(comparisons) > 1:
            print_trend(comparisons)
        for one, over in zip(comparisons, broken, strict=True):
            if len(comparisons) == 1 or over or one.verdict.level != "ok":
                print_comparison(one, over)
        for spike in standing_out:
            console().print(f"[yellow]{spike.code}[/] {shown(spike.message)}")
        print_verdict(overall, broken)
    if annotations is not None:
        _annotate(annotations, annotations_file, comparisons, broken, fail_on)
    if pairing.unreadable:
        finish(CANNOT_LOOK)
    nothing = any(one.verdict.level == "nothing-compared" for one in comparisons)
    failed = any(broken) or any(fails(one.verdict.level, fail_on.value) for one in comparisons)
    if nothing and fail_on not in (FailOn.never, FailOn.nothing_compared):
        finish(CANNOT_LOOK)
    if failed:
        finish(WRONG)


def _thresholds(texts: Sequence[str]) -> Thresholds:
    try:
        return Thresholds(tuple(parse_threshold(text, names=METRICS + COUNTS) for text in texts))
    except ValueError as error:
        raise UsageError(
            five_parts(
                "--fail-if",
                expected=str(error),
                found=repr(list(texts)),
                follows="Nothing was compared.",
                next_step="Example: --fail-if 'abs_diff.mean>0.05'",
            )
        ) from None


def _passed(comparison: Comparison, limit: Threshold) -> dict[str, Any]:
    from slime_instrument._format.values import plain_value

    return {
        "metric": limit.metric,
        "sign": limit.sign,
        "limit": limit.limit,
        "value": plain_value(comparison.value(limit.metric)),
    }


def print_comparison(comparison: Comparison, above: Sequence[Threshold]) -> None:
    """Print one comparison; ``above``: the limits that it is beyond."""
    from slime_instrument._format.references import ReferenceCounts

    out = console()
    files = ", ".join(comparison["train"][:2]) + (" …" if len(comparison["train"]) > 2 else "")
    out.print(shown(f"rollout {comparison['rollout_id']}: {comparison['rollout']} against {files}"))
    out.print(
        f"{counted(comparison['n_joined'], 'sample')} joined ({comparison['n_rollout']} in the rollout, "
        f"{comparison['n_train']} in training), {counted(comparison['n_tokens'], 'comparable token')}"
    )
    if comparison["log_probs"]["field"] != "log_probs":
        out.print(f"train side: {shown(comparison['log_probs']['field'])}")
    left_out = dict(comparison["excluded"])
    removed = left_out.pop("removed")
    excluded = [counted(n, f"{kind} token") for kind, n in left_out.items() if n]
    excluded += [counted(removed, "removed sample")] if removed else []
    if excluded:
        out.print(f"left out: {', '.join(excluded)}")
    for side, references in comparison["references"].items():
        if references["total"]:
            out.print(shown(f"{side}: {ReferenceCounts(**references)}"))
    _print_unmatched(comparison)
    if comparison["n_tokens"]:
        rows = table("metric", "value")
        for name, value in comparison["abs_diff"].items():
            rows.add_row(f"|δ| {name}", number(value, 6))
        for name in ("k1", "k2", "k3", "ess", "token_mult_prob_error", "chi2_token"):
            rows.add_row(name, number(comparison[name], 6))
        rows.add_row("correlation of probabilities", number(comparison["prob_diff"]["pearson"], 6))
        out.print(rows)
        _print_histogram(comparison)
    for finding in comparison.findings:
        where = f"; docs/findings.md, section {finding.code}"
        print_finding(finding.code, finding.message, finding.samples, where)
    for warning in comparison["warnings"][:SHOWN]:
        out.print(f"[yellow]warning[/] {shown(warning)}")
    for over in above:
        value = shown_value(comparison.value(over.metric))
        out.print(f"[bold red]failed[/] --fail-if '{over}': {over.metric} is {value}")


def print_trend(comparisons: Sequence[Comparison]) -> None:
    """One line per rollout."""
    rows = table()
    for heading in ("rollout", "joined", "tokens", "mean |δ|", "p99 |δ|", "k3", "ess", "verdict"):
        rows.add_column(heading, no_wrap=True)
    rows.add_column("findings", overflow="fold")
    for one in comparisons:
        codes = ", ".join(finding.code for finding in one.findings)
        numbers = (one["abs_diff"]["mean"], one["abs_diff"]["p99"], one["k3"], one["ess"])
        counts = (str(one["rollout_id"]), f"{one['n_joined']}/{one['n_rollout']}", str(one["n_tokens"]))
        rows.add_row(*counts, *(number(value, 3) for value in numbers), one.verdict.level, codes or "-")
    console().print(rows)


def _print_unmatched(comparison: Comparison) -> None:
    counts: dict[tuple[str, str], list[Any]] = {}
    for one in comparison["unmatched"]:
        name = one["position"] if one["position"] is not None else f"index {one['index']}"
        counts.setdefault((one["side"], one["reason"]), []).append(name)
    for (side, reason), names in counts.items():
        shown = ", ".join(map(str, names[:SHOWN])) + (" …" if len(names) > SHOWN else "")
        console().print(f"{counted(len(names), f'{side} sample')} {reason}: {shown}")


def _print_histogram(comparison: Comparison) -> None:
    import torch

    size = comparison.table.size
    counts = torch.bincount(torch.bucketize(size, torch.tensor(_EDGES), right=True), minlength=len(_EDGES) + 1)
    most = max(1, int(counts.max()))
    edges = ["0", *(f"{edge:g}" for edge in _EDGES)]
    labels = [f"{low} to {high}" for low, high in itertools.pairwise(edges)] + [f"{edges[-1]} and more"]
    for label, count in zip(labels, counts.tolist(), strict=True):
        console().print(f"  |δ| {label:<16} {bar(count / most, _BAR)} {count}")


def print_verdict(verdict: Verdict, broken: Sequence[Sequence[Threshold]]) -> None:
    """The last line: the verdict, and each limit that a comparison is beyond."""
    colour = {"ok": "green", "unexplained": "yellow", "fault": "bold red", "nothing-compared": "bold red"}
    passed = [str(limit) for over in broken for limit in over]
    extra = f"; failed by --fail-if {', '.join(dict.fromkeys(passed))}" if passed else ""
    console().print(f"verdict: [{colour[verdict.level]}]{shown(verdict.text)}[/]{shown(extra)}")


def _annotate(
    form: Annotations,
    file: Path,
    comparisons: Sequence[Comparison],
    broken: Sequence[Sequence[Threshold]],
    fail_on: FailOn,
) -> None:
    """One entry per comparison, for GitHub's log or as JUnit's XML."""
    from xml.sax.saxutils import escape, quoteattr

    from slime_instrument._analysis.verdict import fails

    cases, failures = [], 0
    for one, over in zip(comparisons, broken, strict=True):
        text = " ".join([one.verdict.text, *(f"Failed by --fail-if {limit}." for limit in over)])
        failed = bool(over) or fails(one.verdict.level, fail_on.value)
        failures += failed
        name = f"rollout {one.rollout_id}"
        if form is Annotations.github:
            level = "error" if failed else "notice"
            line = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
            note(f"::{level} title=slime-instrument, {name}::{line}")
            continue
        body = f"<failure message={quoteattr(text)}/>" if failed else f"<system-out>{escape(text)}</system-out>"
        cases.append(f'<testcase classname="slime-instrument compare" name={quoteattr(name)}>{body}</testcase>')
    if form is Annotations.junit:
        suite = f'<testsuite name="slime-instrument compare" tests="{len(cases)}" failures="{failures}">'
        head = '<?xml version="1.0" encoding="UTF-8"?>'
        file.write_text("\n".join([head, suite, *cases, "</testsuite>", ""]), encoding="utf-8")


def report(
    dumps: PairedDumps,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.html", help="The page to write.")] = Path(
        "report.html"
    ),
    tokenizer: Tokenizer = None,
    sweep: Annotated[
        str | None,
        typer.Option(metavar="NAME:PARAMETER=VALUE,VALUE,…", help="Add the curve of a what-if sweep to the page."),
    ] = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
) -> None:
    """Compare every rollout with its training and write one self-contained page.

    The page opens from disk without a network. Exit status: 0 written, whatever it says; 2 nothing to report on, or a
    file could not be read: the page is about the others.
    """
    with reporting_errors(as_json=json):
        need("jinja2", "the report", extra="report", as_json=json)
        from slime_instrument._analysis.corrections import parse_sweep
        from slime_instrument._report.build import write_report

        check_output(out)
        with progress("reading") as say:
            written = write_report(
                dumps,
                out,
                tokenizer=tokenizer,
                allow_pickle=allow_pickle,
                sweep=parse_sweep(sweep) if sweep else None,
                progress=say,
            )
        note_unused(written.skipped[:SHOWN])
        if len(written.skipped) > SHOWN:
            note(f"slime_instrument: and {len(written.skipped) - SHOWN} more files not used")
        if json:
            print_json(written.as_dict())
        else:
            _print_written(written)
        if any(one.unreadable for one in written.skipped):
            finish(CANNOT_LOOK)


def _print_written(written: Report) -> None:
    print(written.verdict.text)
    for question, answer, _ in written.verdict.answers:
        print(f"  {question}: {answer}")
    for one in written.left_out:
        print(f"  left out: {one}")
    print(f"{written.path}: {counted(len(written.pairs), 'rollout')}, {written.size / 1e6:.1f} MB")


def view(
    dumps: PairedDumps,
    rollout: Annotated[
        int | None, typer.Option(metavar="ID", help="Which rollout of a folder; the last one otherwise.")
    ] = None,
    tokenizer: Tokenizer = None,
    allow_pickle: AllowPickle = False,
) -> None:
    """Look at samples and tokens in the terminal: sort, search, next worst. Keys are shown at the bottom."""
    with reporting_errors():
        need("textual", "the viewer", extra="view")
        from slime_instrument._view.app import view_dumps

        view_dumps(dumps, rollout=rollout, tokenizer=tokenizer, allow_pickle=allow_pickle)
