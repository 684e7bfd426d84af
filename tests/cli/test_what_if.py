"""The command over a pair of dumps whose mismatch is known."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.analysis.seeded import SIZES, exact
from tests.cli.outcomes import strict


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A folder of two rollouts; every fourth token of training is three times as probable as the engine said."""
    for rollout_id in (7, 8):
        case = exact(SIZES[0], seed=rollout_id)
        for n, sample in enumerate(case.train["samples"]):
            sample["log_probs"][::4] += math.log(3.0)
            sample["advantages"] = torch.full_like(sample["log_probs"], (-1.0) ** n)
        for side, payload in (("rollout_data", case.rollout), ("train_data", case.train)):
            (tmp_path / side).mkdir(exist_ok=True)
            torch.save({**payload, "rollout_id": rollout_id}, tmp_path / side / f"{rollout_id}.pt")
    return tmp_path


def test_every_policy_is_tried_on_every_rollout(call: Any, pair: Path) -> None:
    outcome = call("what-if", pair, "--json")
    assert outcome.code == 0, outcome.err
    policies = {one["name"]: one for one in strict(outcome.out)["policies"]}
    none, tis, icepop = policies["none"], policies["slime-tis"], policies["slime-icepop"]
    assert (none["mean_weight"], none["ess"], none["advantage_kept"], none["tokens_dropped"]) == (1.0, 1.0, 1.0, 0)
    n = none["n_tokens"]
    assert tis["tokens_clipped"] == icepop["tokens_dropped"]
    assert 0.2 < icepop["tokens_dropped"] / n < 0.3
    assert icepop["advantage_kept"] == pytest.approx(1 - icepop["tokens_dropped"] / n, abs=1e-6)
    assert tis["mean_weight"] == pytest.approx(1 + icepop["tokens_dropped"] / n, abs=1e-5)
    assert [one["rollout_id"] for one in tis["rollouts"]] == [7, 8]
    assert sum(one["n_tokens"] for one in tis["rollouts"]) == n
    for by, groups in tis["splits"].items():
        assert sum(one["n_tokens"] for one in groups) == n, by
    assert {one["group"] for one in tis["splits"]["advantage"]} == {"positive", "negative"}


def test_a_policy_of_ones_own_is_shown_with_its_splits(call: Any, pair: Path) -> None:
    outcome = call("what-if", pair, "--policy", "slime-tis:tis_clip=4")
    assert outcome.code == 0, outcome.err
    assert "slime-tis:tis_clip=4" in outcome.out
    assert "negative" in outcome.out
    assert "verl" not in outcome.out


def test_a_sweep_has_a_row_for_each_value(call: Any, pair: Path) -> None:
    outcome = call("what-if", pair, "--sweep", "slime-tis:tis_clip=1.5,2,4", "--json")
    policies = strict(outcome.out)["policies"]
    assert [one["parameters"]["tis_clip"] for one in policies] == [1.5, 2.0, 4.0]
    assert [one["tokens_clipped"] > 0 for one in policies] == [True, True, False]


def test_without_advantages_what_needs_none_is_shown(call: Any, pair: Path) -> None:
    for file in (pair / "train_data").iterdir():
        payload = torch.load(file, weights_only=True)
        for sample in payload["samples"]:
            del sample["advantages"]
        torch.save(payload, file)
    document = strict(call("what-if", pair, "--json").out)
    assert {one["name"] for one in document["skipped"]} == {"slime-opsm", "prime-rl-dppo"}
    assert all(one["advantage_kept"] is None for one in document["policies"])


@pytest.mark.parametrize("arguments", [("--policy", "tis"), ("--policy", "slime-tis:clip=1"), ("--sweep", "slime-tis")])
def test_what_means_nothing_ends_with_2(call: Any, pair: Path, arguments: tuple[str, str]) -> None:
    outcome = call("what-if", pair, *arguments)
    assert outcome.code == 2
    assert "expected" in outcome.err


def test_a_sweep_without_values_is_refused_as_a_sweep(call: Any, pair: Path) -> None:
    assert "--sweep: expected NAME:PARAMETER=VALUE" in call("what-if", pair, "--sweep", "slime-tis").err


def test_nothing_to_try_on_ends_with_2(call: Any, pair: Path) -> None:
    outcome = call("what-if", pair / "train_data", "--json")
    assert outcome.code == 2
    assert "Nothing was tried" in strict(outcome.out)["error"]


def test_the_list_names_every_parameter(call: Any) -> None:
    outcome = call("what-if", "--list")
    assert outcome.code == 0
    assert "vllm_importance_sampling_clip_max=3" in outcome.out
