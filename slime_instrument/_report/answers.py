"""What the page says beside the verdict: one sample or all, where in the response, since when, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slime_instrument._analysis.compare import Comparison
from slime_instrument._analysis.diagnosis import Finding, View
from slime_instrument._analysis.groups import outliers
from slime_instrument._analysis.metrics import Metrics, WorstToken
from slime_instrument._analysis.trend import Step, stands_out, step_in
from slime_instrument._analysis.verdict import Verdict
from slime_instrument._analysis.verdict import judge_all as worst_of
from slime_instrument._format.values import show


@dataclass(frozen=True)
class Answers:
    """A verdict with its answers.

    Attributes:
        verdict: of one comparison or of several.
        answers: question, answer in plain text, and where in the page it can be seen ("" where nowhere).
    """

    verdict: Verdict
    answers: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def level(self) -> str:
        """Of the verdict."""
        return self.verdict.level

    @property
    def text(self) -> str:
        """Of the verdict, as a sentence."""
        return f"{self.verdict.text[0].upper()}{self.verdict.text[1:]}"

    def as_dict(self) -> dict[str, Any]:
        return {**self.verdict.as_dict(), "answers": [list(one) for one in self.answers]}


@dataclass(frozen=True)
class Judged:
    """What is kept of one comparison after its dumps were let go."""

    name: str
    metrics: Metrics
    codes: tuple[str, ...]
    worst: tuple[WorstToken, ...]
    told: Answers


def answer(compared: Comparison) -> Answers:
    """The answers about one rollout."""
    if not compared.n_tokens:
        return Answers(compared.verdict, [("Why", compared.verdict.text, "")])
    metrics = compared.metrics
    why = " ".join(one.message for one in compared.findings) or "No finding. What remains is numerical noise."
    return Answers(
        compared.verdict,
        [
            ("How much", f"{number(metrics.abs_diff.mean)} nats on average between the two log-probs of a token; "
             f"{_size(metrics.token_mult_prob_error)}.", ""),
            ("One sample or all", _who(compared), ""),
            ("Where in the response", _where(metrics), ""),
            ("Worst token", *_worst(compared.worst, 0)),
            ("Why", why, "#samples" if compared.verdict.level == "unexplained" else ""),
        ],
    )  # fmt: skip


def judged(compared: Comparison, name: str) -> Judged:
    """One comparison, for :func:`answer_all`."""
    codes = tuple(dict.fromkeys(one.code for one in compared.findings))
    return Judged(name, compared.metrics, codes, compared.worst, answer(compared))


def answer_all(rollouts: Sequence[Judged], spikes: Sequence[Finding] = ()) -> Answers:
    """The answers about all rollouts of a report, in order.

    Args:
        rollouts: each of them.
        spikes: optimizer steps whose gradient norm stands out.
    """
    told = _together(rollouts)
    rows = [("Gradient norm", f"{one.message[0].upper()}{one.message[1:]}", _link(one)) for one in spikes]
    return replace(told, answers=[*told.answers, *rows])


def _link(spike: Finding) -> str:
    """To the sample that carries the most of it."""
    if not spike.samples:
        return ""
    return f"#r={spike.evidence['rollout']}&s={spike.evidence['shares'][0]['position']}"


def _together(rollouts: Sequence[Judged]) -> Answers:
    verdict = worst_of([one.told.verdict for one in rollouts], [one.name for one in rollouts])
    if len(rollouts) <= 1:
        return rollouts[0].told if rollouts else Answers(verdict)
    means = [(one.metrics.abs_diff.mean, one.name) for one in rollouts if one.metrics.abs_diff.mean is not None]
    answers = [("Since when", _since(rollouts), "#trend-box")]
    if means:
        (low, _), (high, where) = min(means), max(means)
        text = f"mean |δ| from {number(low)} to {number(high)} nats; the largest in {where}."
        answers.append(("How much", text, "#trend-box"))
    tokens = [(one.worst[0].abs_diff, -i) for i, one in enumerate(rollouts) if one.worst]
    if tokens:
        place = -max(tokens)[1]
        text, link = _worst(rollouts[place].worst, place)
        answers.append(("Worst token", f"{rollouts[place].name.capitalize()}: {text[0].lower()}{text[1:]}", link))
    if verdict.level != "ok":
        concerned = [one for one in rollouts if one.told.level == verdict.level]
        worst = max(concerned, key=lambda one: one.metrics.abs_diff.mean or 0.0)
        why = next(text for question, text, _ in worst.told.answers if question == "Why")
        answers.append(("Why", f"{worst.name.capitalize()}: {why}", ""))
    return Answers(verdict, answers)


def number(value: float | None) -> str:
    """Three digits that count; a dash for a missing value."""
    return "–" if value is None else f"{value:.3g}"


def _size(error: float | None) -> str:
    if error is None or error == float("inf"):
        return "the factor between the two probabilities exceeds what a number holds"
    return f"the two probabilities differ by {100 * (error - 1):.3g} % on average"


def _who(compared: Comparison) -> str:
    sums = compared.table.pair_sums
    n, total = int(sums.present.sum()), float(sums.size.sum())
    if not total:
        return f"None of {n} samples differs at all."
    if n == 1:
        return "There is one sample only."
    groups = outliers(View(compared.rollout_dump, compared.train_dump, compared.joined, compared.table))
    if groups:
        group = groups[0].pairs
        others = ~group & sums.present
        positions = [compared.table.pairs[i].position for i in group.nonzero().flatten().tolist()]
        inside = float(sums.size[group].sum() / sums.counts[group].sum())
        outside = float(sums.size[others].sum() / sums.counts[others].sum())
        who = f"A group: {len(positions)} of {n} samples carry" if len(positions) > 1 else f"One of {n} samples carries"
        return (
            f"{who} {float(sums.size[group].sum()) / total:.0%} of the "
            f"difference; mean |δ| is {number(inside)} there and {number(outside)} in the others. Positions "
            f"{show(positions)}."
        )
    ordered = sums.size.sort(descending=True).values.cumsum(0)
    half = int((ordered < total / 2).sum()) + 1
    if half <= max(1, n // 10):
        one = "one sample carries" if half == 1 else f"{half} samples carry"
        return f"A few: {one} half of all difference; {n} were compared."
    return f"All alike: it takes {half} of {n} samples to make up half of the difference."


def _where(metrics: Metrics) -> str:
    groups = metrics.drift.decile
    if len(groups) < 2:
        return "The responses are too short to say."
    found = stands_out(groups, metrics)
    if found is None:
        return "Evenly along the response, as far as so many tokens can tell."
    peak, rest = found
    where = {0: "at its beginning", 9: "at its end"}.get(int(peak.key or 0), f"in tenth {int(peak.key or 0) + 1} of 10")
    times = f"{peak.mean_abs / rest:.1f} times" if rest else "far above"
    return f"Most {where}: mean |δ| is {times} that of the rest."


def _worst(worst: Sequence[WorstToken], rollout: int) -> tuple[str, str]:
    """In words, and the link to it."""
    if not worst:
        return "No token differs.", ""
    one = worst[0]
    text = (
        f"Sample {one.position}, token {one.token}: the rollout says {one.rollout:.4g}, training {one.train:.4g}; |δ| "
        f"is {number(one.abs_diff)}."
    )
    return text, f"#r={rollout}&s={one.position}&t={one.token}"


def _since(rollouts: Sequence[Judged]) -> str:
    seen: dict[str, list[int]] = {}
    for i, one in enumerate(rollouts):
        for code in one.codes:
            seen.setdefault(code, []).append(i)
    parts = []
    step = step_in([one.metrics.abs_diff.mean for one in rollouts])
    if step is not None:
        parts.append(describe_step(step, [one.name for one in rollouts]))
    for code, places in seen.items():
        first, n = rollouts[places[0]].name, len(places)
        lasting = places[-1] == len(rollouts) - 1 and n == len(rollouts) - places[0]
        if n == len(rollouts):
            parts.append(f"{code}: in every rollout")
        elif lasting:
            parts.append(f"{code}: in every rollout since {first}")
        else:
            parts.append(f"{code}: in {n} of {len(rollouts)} rollouts, first in {first}")
    return (
        "; ".join(parts) + "." if parts else "No rollout has a finding, and the size of the difference does not step."
    )


def describe_step(step: Step, names: Sequence[str]) -> str:
    """A change of level in words."""
    way = "rises" if step.after > step.before else "falls"
    return (
        f"since {names[step.at]} mean |δ| {way} {max(step.factor, 1 / step.factor):.1f} times, from "
        f"{number(step.before)} to {number(step.after)} (chance of noise: {step.chance:.1g})"
    )
