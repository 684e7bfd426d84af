"""The one judgement on a comparison: shown by compare, report, view, live metrics and gates alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.metrics import Metrics

Level = Literal["ok", "nothing-compared", "unexplained", "fault"]
LEVELS: tuple[Level, ...] = ("ok", "nothing-compared", "unexplained", "fault")
"""From the best to the worst."""


@dataclass(frozen=True)
class Verdict:
    """A judgement.

    Attributes:
        level: ``ok``; ``unexplained``: the sides differ more than kernels do, and no cause was shown; ``fault``: a
            finding; ``nothing-compared``: no token could be compared.
        text: the judgement in one line.
    """

    level: Level
    text: str

    def as_dict(self) -> dict[str, str]:
        return {"level": self.level, "text": self.text}


def fails(level: Level, fail_on: Level | Literal["never"]) -> bool:
    """Whether a verdict of this level fails a gate that fails from ``fail_on`` on. Having compared nothing counts as
    bad as not knowing why: no gate passes on it, save ``never``."""
    if fail_on == "never" or level == "ok":
        return False
    return level == "nothing-compared" or LEVELS.index(level) >= LEVELS.index(fail_on)


def judge(metrics: Metrics, findings: Sequence[Finding], *, n_joined: int, why_nothing: str = "") -> Verdict:
    """The verdict on one comparison.

    Args:
        metrics, findings: of the comparison.
        n_joined: samples that were joined.
        why_nothing: why no token could be compared, in words.
    """
    codes = list(dict.fromkeys(one.code for one in findings))
    known = [code for code in codes if code != "unexplained-mismatch"]
    size = f"mean |δ| {metrics.abs_diff.mean:.3g} over {metrics.n_tokens} tokens" if metrics.n_tokens else ""
    if not metrics.n_tokens:
        text = f"nothing was compared: {why_nothing or 'there are no tokens'}"
        if known:
            text += f"; found: {', '.join(known)}"
        return Verdict("nothing-compared", text)
    if known:
        return Verdict("fault", f"fault: {', '.join(codes)}; {size}")
    if codes:
        return Verdict("unexplained", f"unexplained: differs more than kernels do, cause not shown; {size}")
    return Verdict("ok", f"ok: no finding; {size} of {n_joined} samples")


def judge_all(verdicts: Sequence[Verdict], names: Sequence[str]) -> Verdict:
    """The verdict on several rollouts: the worst one, with how many have it and the first of them."""
    if not verdicts:
        return Verdict("nothing-compared", "nothing was compared: there are no pairs of dumps")
    if len(verdicts) == 1:
        return verdicts[0]
    worst = max(verdicts, key=lambda one: LEVELS.index(one.level))
    concerned = [name for one, name in zip(verdicts, names, strict=True) if one.level == worst.level]
    if worst.level == "ok":
        return Verdict("ok", f"ok: no finding in {len(verdicts)} rollouts")
    return Verdict(
        worst.level, f"{worst.level} in {len(concerned)} of {len(verdicts)} rollouts; {concerned[0]}: {worst.text}"
    )
