"""A comparison for people: tables, a small histogram of |δ|, findings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime_instrument._cli.output import console, shown

if TYPE_CHECKING:
    from slime_instrument._analysis.compare import Comparison
    from slime_instrument._analysis.thresholds import Threshold

__all__ = ["print_comparison", "print_trend"]

_EDGES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
_BAR = 40
_SHOWN = 8


def print_comparison(
    comparison: Comparison, above: Sequence[dict[str, Any]], thresholds: Sequence[Threshold] = ()
) -> None:
    """Print one comparison; ``above``: the thresholds that it passed."""
    from rich.table import Table

    out = console()
    files = ", ".join(comparison["train"][:2]) + (" …" if len(comparison["train"]) > 2 else "")
    out.print(shown(f"rollout {comparison['rollout_id']}: {comparison['rollout']} against {files}"))
    out.print(
        f"{comparison['n_joined']} samples joined ({comparison['n_rollout']} in the rollout, "
        f"{comparison['n_train']} in training), {comparison['n_tokens']} comparable tokens"
    )
    if comparison["log_probs"]["field"] != "log_probs":
        out.print(f"train side: {shown(comparison['log_probs']['field'])}")
    excluded = ", ".join(f"{n} {kind}" for kind, n in comparison["excluded"].items() if n)
    if excluded:
        out.print(f"left out: {excluded} (tokens; removed: samples)")
    _print_unmatched(comparison)
    if comparison["n_tokens"]:
        table = Table(box=None, pad_edge=False)
        for heading in ("metric", "value"):
            table.add_column(heading)
        for name, value in _rows(comparison):
            table.add_row(name, _number(value))
        out.print(table)
        _print_histogram(comparison)
    for finding in comparison.diagnosis:
        out.print(f"[bold red]{shown(finding.code)}[/] {shown(finding.message)}")
        positions = ", ".join(map(str, finding.samples[:_SHOWN]))
        more = f" … ({len(finding.samples)} in all)" if len(finding.samples) > _SHOWN else ""
        out.print(f"  positions {positions}{more}; docs/findings.md, section {finding.code}")
    for warning in comparison["warnings"][:_SHOWN]:
        out.print(f"[yellow]warning[/] {shown(warning)}")
    for over in above:
        out.print(f"[bold red]above the threshold[/] {over['metric']} = {over['value']:.6g} > {over['limit']:g}")
    if not comparison.diagnosis and not above:
        out.print("[green]no findings[/]" + (", no threshold passed" if thresholds else ""))


def print_trend(comparisons: Sequence[Comparison]) -> None:
    """One line per rollout."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("rollout", "joined", "tokens", "mean |δ|", "p99 |δ|", "k3", "ess", "findings"):
        table.add_column(heading)
    for one in comparisons:
        codes = ", ".join(finding.code for finding in one.diagnosis)
        numbers = (one["abs_diff"]["mean"], one["abs_diff"]["p99"], one["k3"], one["ess"])
        counts = (str(one["rollout_id"]), f"{one['n_joined']}/{one['n_rollout']}", str(one["n_tokens"]))
        table.add_row(*counts, *map(_number, numbers), codes or "-")
    console().print(table)


def _rows(comparison: Comparison) -> list[tuple[str, Any]]:
    rows = [(f"|δ| {name}", value) for name, value in comparison["abs_diff"].items()]
    rows += [(name, comparison[name]) for name in ("k1", "k2", "k3", "ess", "token_mult_prob_error", "chi2_token")]
    rows.append(("correlation of probabilities", comparison["prob_diff"]["pearson"]))
    return rows


def _print_unmatched(comparison: Comparison) -> None:
    counts: dict[tuple[str, str], list[Any]] = {}
    for one in comparison["unmatched"]:
        name = one["position"] if one["position"] is not None else f"index {one['index']}"
        counts.setdefault((one["side"], one["reason"]), []).append(name)
    for (side, reason), names in counts.items():
        shown = ", ".join(map(str, names[:_SHOWN])) + (" …" if len(names) > _SHOWN else "")
        console().print(f"{len(names)} {side} samples {reason}: {shown}")


def _print_histogram(comparison: Comparison) -> None:
    import torch

    size = comparison.table.size
    counts = torch.bincount(torch.bucketize(size, torch.tensor(_EDGES), right=True), minlength=len(_EDGES) + 1)
    most = max(1, int(counts.max()))
    labels = ["0", *(f"{edge:g}" for edge in _EDGES)]
    for label, count in zip(labels, counts.tolist(), strict=True):
        bar = "█" * round(_BAR * count / most) or ("▏" if count else "")
        console().print(f"  |δ| ≥ {label:<6} {bar} {count}")


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}"
