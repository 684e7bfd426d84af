"""The verdict in words, from records of real comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slime_instrument._analysis.compare import compare
from slime_instrument._report.answers import Answers, answer, answer_all
from slime_instrument._report.answers import judged as kept

from .dumps import Change, one_bad_token, ragged, shifted, write_run


def judged(tmp_path: Path, **run: Any) -> Answers:
    folder = write_run(tmp_path, **run)
    return answer(compare(folder / "rollout_data" / "0.pt", folder / "train_data" / "0.pt"))


def answers(verdict: Answers) -> dict[str, str]:
    return {question: answer for question, answer, _ in verdict.answers}


@pytest.mark.parametrize(
    ("change", "level", "says"),
    [
        (None, "ok", "Ok: no finding"),
        (shifted, "fault", "token-shift"),
        (ragged, "fault", "non-finite"),
        (one_bad_token, "unexplained", "cause not shown"),
    ],
)
def test_the_level_follows_the_findings_and_the_size(
    tmp_path: Path, change: Change | None, level: str, says: str
) -> None:
    verdict = judged(tmp_path, samples=16, change=change)
    assert verdict.level == level
    assert says in verdict.text


def test_one_bad_sample_is_told_from_a_fault_in_all(tmp_path: Path) -> None:
    one = answers(judged(tmp_path / "one", samples=16, change=one_bad_token))
    assert one["One sample or all"] == "A few: one sample carries half of all difference; 16 were compared."
    assert one["Worst token"].startswith("Sample 5, token 7:")
    every = answers(judged(tmp_path / "all", samples=16, change=shifted))
    assert every["One sample or all"].startswith("All alike: it takes")
    assert every["Where in the response"].startswith("Evenly along the response")


def test_where_in_the_response_it_grows_is_said(tmp_path: Path) -> None:
    def late(train: list[dict[str, Any]], _source: list[dict[str, Any]]) -> None:
        for one in train:
            one["log_probs"][-10:] -= 0.05

    text = answers(judged(tmp_path, samples=16, length=100, change=late))["Where in the response"]
    assert text.startswith("Most at its end: mean |δ| is ")


def test_nothing_to_compare_says_why(tmp_path: Path) -> None:
    def unmatched(train: list[dict[str, Any]], _source: list[dict[str, Any]]) -> None:
        for one in train:
            one["log_probs"] = None

    verdict = judged(tmp_path, change=unmatched)
    assert verdict.level == "nothing-compared"
    assert "no token has both log-probs" in answers(verdict)["Why"]


def test_over_rollouts_it_says_since_when(tmp_path: Path) -> None:
    folder = write_run(tmp_path, rollouts=4, samples=8, length=60, change=shifted, changed_from=2)
    records = [compare(folder / "rollout_data" / f"{i}.pt", folder / "train_data" / f"{i}.pt") for i in range(4)]
    verdict = answer_all([kept(record, f"rollout {i}") for i, record in enumerate(records)])
    assert verdict.level == "fault"
    assert verdict.text.startswith("Fault in 2 of 4 rollouts; rollout 2: fault: token-shift;")
    assert answers(verdict)["Since when"].endswith("token-shift: in every rollout since rollout 2.")
    link = next(link for question, _, link in verdict.answers if question == "Worst token")
    assert link.startswith(("#r=2&s=", "#r=3&s="))
