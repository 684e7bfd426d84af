"""A selection of the fault matrix; ``python -m tests.faults.matrix`` plays all of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.faults.matrix import Result, play, table
from tests.faults.scenarios import Layout, Scenario, everything, reference
from tests.faults.sites import ALL, SLEEP_S
from tests.faults.verdict import judge

pytestmark = pytest.mark.lab

LAYOUT = Layout(1, 1, 2, 2)
LENIENT = [("hook/data-loader/after", 1, None), ("hook/log-probs/after", 3, 1), ("hook/policy-loss/cleanup", 0, 0)]
LENIENT += [("hook/train-dump/before", 2, None), ("dump/topology", 1, None)]
LENIENT += [("dump/gather-send", 2, 1), ("dump/gather-feed", 0, None), ("dump/write", 0, None)]
STRICT = [
    ("dump/gather-send", 3, 1),
    ("dump/rename", 0, None),
    ("hook/train-dump/inside", 1, None),
]
CHOSEN = [
    *(Scenario(site, rank, nth, False, (0, 2), 4) for site, rank, nth in LENIENT),
    *(Scenario(site, rank, nth, True, (0, 2), 4) for site, rank, nth in STRICT),
    Scenario("slime/loss/after", -1, 1, True, (0, 2), 4),
    Scenario("slime/optimizer-step/before", -1, None, False, (0, 2), 4),
    Scenario("slime/train-actor/after", -1, None, False, (1,), 2, alone=True),
    Scenario("peer/late", 1, None, False, (0,), 2),
    Scenario("peer/stalls-while-sending", 2, 1, False, (0,), 3),
    Scenario("peer/stopped-while-receiving", 0, 1, False, (0,), 3),
    Scenario("hook/log-probs/before", 2, 1, True, (1,), 2, alone=True),
    Scenario("peer/killed-while-sending", 3, 1, False, (1,), 2, alone=True),
]
STEPS_OUT = Scenario("dump/contribute", 1, None, False, (0, 1, 2, 3), 4)


@pytest.fixture(scope="module")
def played() -> dict[str, Result]:
    return {result.scenario.name: result for result in play([*CHOSEN, STEPS_OUT], LAYOUT)}


@pytest.mark.parametrize("scenario", CHOSEN, ids=lambda scenario: scenario.name)
def test_a_fault_leaves_training_files_and_state_as_they_must_be(played: dict[str, Result], scenario: Scenario) -> None:
    assert played[scenario.name].problems == []


def test_after_three_failures_in_a_row_a_rank_steps_out_and_no_other_waits_for_it(played: dict[str, Result]) -> None:
    reports = played[STEPS_OUT.name].answer["reports"]
    last = {rank: report["rollouts"][3] for rank, report in reports.items()}
    assert last["1"]["states"]["train-dump"] == "FAILED"
    assert [report["fired"] for report in last.values()] == [0, 0, 0, 0]
    assert max(report["seconds"] for report in last.values()) < SLEEP_S
    assert all(report["error"] is None for report in last.values())
    assert all(report["stale"] == [] for report in last.values())


def test_the_whole_matrix_has_every_site_on_every_rank_that_reaches_it() -> None:
    scenarios = list(everything(LAYOUT))
    assert {scenario.site for scenario in scenarios} == set(ALL)
    assert {scenario.nth for scenario in scenarios if scenario.site == "hook/log-probs/after"} == {0, 1}
    for name, ranks in (("dump/contribute", {0, 1, 2, 3}), ("dump/write", {0}), ("dump/gather-send", {1, 2, 3})):
        for strict in (False, True):
            mine = [scenario for scenario in scenarios if scenario.site == name and scenario.strict is strict]
            assert {scenario.rank for scenario in mine} == ranks
            assert {rollout for scenario in mine for rollout in scenario.faulty} == {0, 2}


def test_the_verdict_sees_each_kind_of_problem(played: dict[str, Result]) -> None:
    """Right reports are made wrong, one thing at a time."""
    scenario = CHOSEN[1]
    answer = played[scenario.name].answer
    normal = reference_answer(answer)

    def problems(rank: str, rollout: int, **wrong: object) -> set[str]:
        broken = copy_of(answer)
        broken["reports"][rank]["rollouts"][rollout].update(wrong)
        return {kind for kind, _ in judge(scenario, LAYOUT, broken, normal)}

    assert problems("0", 0) == set()
    assert problems("3", 0, fired=0) >= {"unreached"}
    assert problems("1", 1, seconds=60.0) == {"wait"}
    assert problems("2", 1, stale=["1 session(s) alive"]) == {"stale"}
    assert problems("2", 2, tensors=[1, 1]) == {"stale"}
    assert problems("1", 0, weights="others") == {"training"}
    assert problems("0", 0, files={**files(answer, 0), "0.pt.part": "x"}) == {"file"}
    assert problems("0", 1, files={**files(answer, 1), "1.pt": "x"}) == {"file"}
    assert problems("0", 0, files={**files(answer, 0), "0.pt": "x"}) == {"file"}
    assert problems("3", 0, failures={}) == {"policy"}
    assert problems("1", 0, error={"type": "ValueError", "text": "", "cause": None}) == {"training"}
    assert {kind for kind, _ in judge(scenario, LAYOUT, {"outcome": "hung"}, normal)} == {"hang"}


def copy_of(answer: dict[str, Any]) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(answer))
    return copied


def files(answer: dict[str, Any], rollout: int) -> dict[str, str]:
    found: dict[str, str] = answer["reports"]["0"]["rollouts"][rollout]["files"]
    return found


def reference_answer(answer: dict[str, Any]) -> dict[str, Any]:
    """What a run without a fault would have reported: the same, with the dumps that were lost."""
    normal = copy_of(answer)
    for report in normal["reports"].values():
        for rollout, seen in enumerate(report["rollouts"]):
            if "files" in seen and rollout in (0, 2):
                seen["files"][f"{rollout}.pt"] = "a dump"
    return normal


def test_the_table_counts_faults_and_problems() -> None:
    results = [Result(CHOSEN[0], [("wait", "one"), ("wait", "two")], {}), Result(CHOSEN[1], [], {})]
    last = table([("here", results, 12.0)]).splitlines()[-1]
    assert last == "| here | 4 | 0 | 1 | 0 | 0 | 0 | 0 | 0 | 12 |"
    assert reference().faulty == ()
