"""What ``compare`` says about the pairs, against what is true of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import settings as declared
from settings import Setting

from slime_instrument._analysis.diagnosis import Finding


@dataclass(frozen=True)
class Judged:
    """One pair: what was found, and whether that is right.

    Attributes:
        found: the findings.
        n_tokens, mean_abs: what was compared.
        right: every expected code is there and no other one that is not allowed.
        error: estimate less truth, where there is a truth and an estimate.
        covered: whether the interval holds the truth; None where there is none.
    """

    setting: Setting
    found: tuple[Finding, ...]
    n_tokens: int
    mean_abs: float
    right: bool
    error: float | None = None
    covered: bool | None = None

    def row(self) -> str:
        """A row of the table, in Markdown."""
        said = ", ".join(
            one.code
            + (f" {one.estimate.value:.3g} ({one.estimate.low:.3g} … {one.estimate.high:.3g})" if one.estimate else "")
            for one in self.found
        )
        expected = " + ".join(self.setting.expected) or (
            f"nothing, or {self.setting.allowed[0]}" if self.setting.allowed else "nothing"
        )
        truth = f"{self.setting.truth:.3g}" if self.setting.truth is not None else ""
        verdict = ("yes" if self.right else "**no**") + (", not covered" if self.covered is False else "")
        name = f"{self.setting.engine}: {self.setting.name}"
        start = f"| {name} | {self.n_tokens} | {self.mean_abs:.3f} | {expected} {truth} "
        return start + f"| {said or 'nothing'} | {verdict} |"


def judge(folder: Path, half: declared.Half) -> list[Judged]:
    """Every pair of a half that is in ``folder``."""
    return [_judge(one, folder / one.folder) for one in declared.settings(half) if (folder / one.folder).exists()]


def _judge(setting: Setting, folder: Path) -> Judged:
    from slime_instrument._analysis.compare import compare

    compared = compare(folder / "rollout.pt", folder / "train.pt")
    found = tuple(compared.diagnosis)
    codes = {one.code for one in found}
    right = set(setting.expected) <= codes and codes <= {*setting.expected, *setting.allowed}
    error = covered = None
    named = next((one.estimate for one in found if one.code == "temperature"), None)
    if setting.truth is not None and named is not None:
        error, covered = named.value - setting.truth, named.low <= setting.truth <= named.high
    return Judged(setting, found, compared["n_tokens"], compared["abs_diff"]["mean"], right, error, covered)


HEADER = "| pair | tokens | mean \\|δ\\| | true | found (interval) | right |\n|---|---|---|---|---|---|"


def table(judged: list[Judged]) -> str:
    """The rows, and below them how many are right and how far the temperatures are off."""
    errors = [abs(one.error) for one in judged if one.error is not None]
    covered = [one.covered for one in judged if one.covered is not None]
    lines = [
        HEADER,
        *(one.row() for one in judged),
        "",
        f"{sum(one.right for one in judged)} of {len(judged)} are right.",
    ]
    if errors:
        lines[-1] += (
            f" Temperature ratios are off by {max(errors):.3f} at most, {sum(errors) / len(errors):.3f} on average; "
            f"{sum(map(bool, covered))} of {len(covered)} intervals hold the truth."
        )
    return "\n".join(lines)
