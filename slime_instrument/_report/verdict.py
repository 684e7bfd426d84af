"""The verdict in words: one sample or all, where in the response, since when, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_instrument._analysis.metrics import MULT_PROB_ERROR_ALARM

__all__ = ["Verdict", "judge", "judge_all", "number"]

USUALLY_NO_FAULT = frozenset({"dtype-rounding", "low-probability-tail", "stale-weights"})
"""Findings that name a known source of difference rather than a mistake; the message says when it is one."""

_OUTLIER = 0.5  # nats
_NO_FAULT = "No sign of a fault"


@dataclass(frozen=True)
class Verdict:
    """``level``: "fine", "look" (something to look at), "fault" or "nothing" (nothing could be compared).

    ``answers``: question, answer in plain text, and where in the page it can be seen ("" where nowhere).
    """

    level: str
    headline: str
    answers: list[tuple[str, str, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {"level": self.level, "headline": self.headline, "answers": [list(one) for one in self.answers]}


def judge(record: dict[str, Any]) -> Verdict:
    """The verdict on one rollout. ``record``: what ``compare`` returned."""
    if not record["n_tokens"]:
        return Verdict(
            "nothing", "Nothing could be compared: 0 comparable tokens.", [("Why", _why_nothing(record), "")]
        )
    findings = record["findings"]
    mean, error = record["abs_diff"]["mean"], record["token_mult_prob_error"]
    large = error is None or error > MULT_PROB_ERROR_ALARM
    faults = [one["code"] for one in findings if one["code"] not in USUALLY_NO_FAULT]
    if faults:
        level, headline = "fault", f"Something is wrong: {', '.join(faults)}."
    elif _lonely(record):
        level = "look"
        headline = (
            f"Rollout and training agree, but single tokens stand out: up to {number(record['abs_diff']['max'])} nats."
        )
        headline += f" Findings: {', '.join(one['code'] for one in findings)}." if findings else ""
    elif large:
        level = "look"
        known = (
            f" Seen: {', '.join(one['code'] for one in findings)}." if findings else " No known cause was recognised."
        )
        headline = (
            f"Rollout and training differ more than usual: the mean factor between their probabilities is "
            f"{number(error)}, and {MULT_PROB_ERROR_ALARM} is worth an alarm.{known}"
        )
    elif findings:
        level = "look"
        headline = f"{_NO_FAULT}, but worth knowing: {', '.join(one['code'] for one in findings)}."
    else:
        level = "fine"
        headline = "No sign of a fault: rollout and training agree, and no known fault pattern was found."
    answers = [
        ("How much", f"{number(mean)} nats on average between the two log-probs of a token; {_size(error)}.", ""),
        ("One sample or all", _who(record), ""),
        ("Where in the response", _where(record), ""),
        ("Worst token", *_worst(record, 0)),
        ("Why", " ".join(one["message"] for one in findings) or "No finding. What remains is numerical noise.", ""),
    ]
    if level == "look" and not findings:
        answers[-1] = ("Why", "No pattern that this tool knows. Look at the worst samples below.", "#samples")
    return Verdict(level, headline, answers)


def judge_all(rollouts: Sequence[tuple[str, dict[str, Any], Verdict]]) -> Verdict:
    """The verdict on all rollouts of a report: (name, record, verdict) of each, in order."""
    if not rollouts:
        return Verdict("nothing", "Nothing could be compared: no pair of dumps.")
    if len(rollouts) == 1:
        return rollouts[0][2]
    worst = next(
        level for level in ("fault", "look", "fine", "nothing") if any(v.level == level for _, _, v in rollouts)
    )
    concerned = [(name, record, verdict) for name, record, verdict in rollouts if verdict.level == worst]
    codes = ", ".join(dict.fromkeys(one["code"] for _, record, _ in concerned for one in record["findings"]))
    named = f": {codes}." if codes else "."
    harmless = all(verdict.headline.startswith(_NO_FAULT) for _, _, verdict in concerned)
    n = len(rollouts)
    headline = {
        "fault": f"Something is wrong in {len(concerned)} of {n} rollouts{named}",
        "look": f"{_NO_FAULT}, but worth knowing in {len(concerned)} of {n} rollouts{named}"
        if harmless
        else f"Something is worth a look in {len(concerned)} of {n} rollouts{named}",
        "fine": f"No sign of a fault in {n} rollouts: rollout and training agree.",
        "nothing": f"Nothing could be compared in any of {n} rollouts.",
    }[worst]
    means = [(record["abs_diff"]["mean"], name) for name, record, _ in rollouts if record["n_tokens"]]
    answers = [("Since when", _since(rollouts), "")]
    if means:
        (low, _), (high, where) = min(means), max(means)
        answers.append(
            ("How much", f"mean |δ| from {number(low)} to {number(high)} nats; the largest in {where}.", "#trend-box")
        )
    tokens = [(record["worst"][0]["abs_diff"], -i) for i, (_, record, _) in enumerate(rollouts) if record["worst"]]
    if tokens:
        place = -max(tokens)[1]
        text, link = _worst(rollouts[place][1], place)
        answers.append(("Worst token", f"{rollouts[place][0].capitalize()}: {text[0].lower()}{text[1:]}", link))
    if worst in ("fault", "look"):
        name, _, verdict = max(concerned, key=lambda one: one[1]["abs_diff"]["mean"])
        why = next(answer for question, answer, _ in verdict.answers if question == "Why")
        answers.append(("Why", f"{name.capitalize()}: {why}", ""))
    return Verdict(worst, headline, answers)


def number(value: float | None) -> str:
    """Three digits that count; a dash for a missing value."""
    return "–" if value is None else f"{value:.3g}"


def _lonely(record: dict[str, Any]) -> bool:
    """Whether the largest difference is of another kind than the rest: no noise, though no mean shows it."""
    largest, p99 = record["abs_diff"]["max"], record["abs_diff"]["p99"]
    return bool(largest > _OUTLIER and largest > 20 * p99)


def _size(error: float | None) -> str:
    if error is None:
        return "the factor between the two probabilities exceeds what a number holds"
    return f"the two probabilities differ by {100 * (error - 1):.3g} % on average"


def _who(record: dict[str, Any]) -> str:
    sums = sorted(((one["mean_abs"] * one["n_tokens"]) for one in record["samples"] if one["n_tokens"]), reverse=True)
    total, n = sum(sums), len(sums)
    if not total:
        return f"None of {n} samples differs at all."
    if n == 1:
        return "There is one sample only."
    half, share = 0, 0.0
    while share < total / 2:
        share += sums[half]
        half += 1
    if half <= max(1, n // 10):
        one = "one sample carries" if half == 1 else f"{half} samples carry"
        return f"A few: {one} half of all difference; {n} were compared."
    return f"All alike: it takes {half} of {n} samples to make up half of the difference."


def _where(record: dict[str, Any]) -> str:
    deciles = [row for row in record["drift"]["decile"] if row["mean_abs"] is not None]
    if len(deciles) < 2:
        return "The responses are too short to say."
    peak, low = max(deciles, key=lambda row: row["mean_abs"]), min(deciles, key=lambda row: row["mean_abs"])
    if peak["mean_abs"] < 2 * low["mean_abs"]:
        return "Evenly along the response."
    where = {0: "at its beginning", 9: "at its end"}.get(peak["decile"], f"in tenth {peak['decile'] + 1} of 10")
    times = f"{peak['mean_abs'] / low['mean_abs']:.1f} times" if low["mean_abs"] else "far above"
    return f"Most {where}: mean |δ| is {times} that of tenth {low['decile'] + 1}."


def _worst(record: dict[str, Any], rollout: int) -> tuple[str, str]:
    """In words, and the link to it."""
    if not record["worst"]:
        return "No token differs.", ""
    one = record["worst"][0]
    text = (
        f"Sample {one['position']}, token {one['token']}: the rollout says {one['rollout']:.4g}, training "
        f"{one['train']:.4g}; |δ| is {number(one['abs_diff'])}."
    )
    return text, f"#r={rollout}&s={one['position']}&t={one['token']}"


def _why_nothing(record: dict[str, Any]) -> str:
    if not record["n_joined"]:
        reasons = sorted({one["reason"] for one in record["unmatched"]})
        return f"No sample could be joined ({', '.join(reasons) or 'the dumps are empty'})."
    counts = ", ".join(f"{count} {kind}" for kind, count in record["excluded"].items() if count)
    absent = record["log_probs"].get("absent")
    return f"{record['n_joined']} samples were joined, but no token has both log-probs ({counts or 'no tokens'})." + (
        f" The train dump says: {absent}." if absent else ""
    )


def _since(rollouts: Sequence[tuple[str, dict[str, Any], Verdict]]) -> str:
    seen: dict[str, list[int]] = {}
    for i, (_, record, _) in enumerate(rollouts):
        for finding in record["findings"]:
            seen.setdefault(finding["code"], []).append(i)
    if not seen:
        return "No rollout has a finding."
    parts = []
    for code, places in seen.items():
        first, n = rollouts[places[0]][0], len(places)
        lasting = places[-1] == len(rollouts) - 1 and n == len(rollouts) - places[0]
        if n == len(rollouts):
            parts.append(f"{code}: in every rollout")
        elif lasting:
            parts.append(f"{code}: in every rollout since {first}")
        else:
            parts.append(f"{code}: in {n} of {len(rollouts)} rollouts, first in {first}")
    return "; ".join(parts) + "."
