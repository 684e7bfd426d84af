"""Metrics have the values that their definitions give, on the tokens that count and no others."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._analysis.compare import Comparison, compare
from slime_instrument._errors import DumpFormatError
from slime_instrument._format.dumps import rollout_dump_of, train_dump_of
from tests.format import builders


def pair(
    rollout: Any, train: Any, *, mask: list[int] | None = None, prompt: int = 3, **source: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One sample on both sides."""
    n = len(train)
    payload = builders.v2([[0]], responses=[n])
    sample = payload["samples"][0]
    sample["tokens"] = torch.arange(prompt + n)
    sample["total_lengths"] = prompt + n
    sample["log_probs"] = train
    sample["loss_masks"] = torch.tensor(mask if mask is not None else [1] * n, dtype=torch.int32)
    dump = builders.rollout(payload)
    del sample["rollout_log_probs"]  # training's own copy; tests of it make one
    dump["samples"][0].update(rollout_log_probs=rollout, **source)
    return dump, payload


def compared(dump: dict[str, Any], payload: dict[str, Any]) -> Comparison:
    return compare(rollout_dump_of(Path("rollout/7.pt"), dump), train_dump_of(Path("train/7.pt"), payload))


def test_masked_tokens_do_not_count() -> None:  # case 8
    dump, payload = pair(
        [-1.0, -2.0, 0.0, 0.0, -3.0], torch.tensor([-1.1, -2.2, -9.0, -8.0, -3.3]), mask=[1, 1, 0, 0, 1]
    )
    found = compared(dump, payload)
    assert found["n_tokens"] == 3
    assert found["abs_diff"]["mean"] == pytest.approx(0.2, rel=1e-6)
    assert found["abs_diff"]["max"] == pytest.approx(0.3, rel=1e-6)
    assert found["excluded"] == {"masked": 2, "missing": 0, "nan": 0, "inf": 0, "filler": 0, "removed": 0}


def test_a_sample_that_is_all_masked_leaves_no_nan() -> None:  # case 9
    found = compared(*pair([-1.0, -2.0], torch.tensor([-1.5, -2.5]), mask=[0, 0]))
    assert found["n_tokens"] == 0
    assert found["abs_diff"] == dict.fromkeys(("mean", "max", "p50", "p95", "p99"))
    assert found["samples"][0]["n_tokens"] == 0
    assert found["samples"][0]["mean_abs"] is None
    assert found["findings"] == []
    json.dumps(found.as_dict(), allow_nan=False)


def test_values_that_are_no_numbers_are_counted_by_kind() -> None:  # case 10
    found = compared(
        *pair([-1.0, None, math.nan, -math.inf, -3.4028235e38], torch.tensor([-1.1, -2.0, -2.0, -math.inf, -1.0]))
    )
    assert found["n_tokens"] == 1
    assert found["abs_diff"]["mean"] == pytest.approx(0.1)
    assert found["excluded"] == {"masked": 0, "missing": 1, "nan": 1, "inf": 1, "filler": 1, "removed": 0}
    assert [finding["code"] for finding in found["findings"]] == ["missing-log-probs", "non-finite"]
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_types_are_equal_within_their_tolerance(dtype: torch.dtype) -> None:  # case 11
    exact = [-0.1234567, -1.5]
    found = compared(*pair(exact, torch.tensor(exact, dtype=dtype)))
    assert found["n_tokens"] == 2
    assert found["abs_diff"]["max"] <= 0.1234567 * torch.finfo(dtype).eps
    assert found["findings"] == []


def test_the_first_token_without_a_prompt_is_missing_and_no_fault() -> None:
    found = compared(*pair([-1.0, -2.0], torch.tensor([math.nan, -2.0]), prompt=0))
    assert found["excluded"]["missing"] == 1
    assert found["excluded"]["nan"] == 0
    assert found["findings"] == []


def test_a_removed_sample_counts_as_a_sample_and_in_no_metric() -> None:
    payload = builders.v2()
    dump = builders.rollout(payload)
    dump["samples"][2]["remove_sample"] = True
    payload["samples"][2]["loss_masks"] = torch.zeros(3, dtype=torch.int32)
    found = compared(dump, payload)
    assert (found["n_joined"], found["n_tokens"]) == (4, 9)
    assert found["excluded"]["removed"] == 1
    assert found["excluded"]["masked"] == 0


def test_log_probs_of_a_wrong_length_are_missing_and_said() -> None:  # case 13
    dump, payload = pair([-1.0] * 5, torch.tensor([-1.0, -1.0, -1.0]))
    found = compared(dump, payload)
    assert found["excluded"]["missing"] == 3
    assert "rollout_log_probs has 5 values, but the response has 3 tokens" in found["warnings"][0]


def test_a_response_of_no_tokens_is_joined_and_harmless() -> None:  # case 2
    payload = builders.v2([[0, 1, 2]], responses=[2, 0, 3])
    found = compared(builders.rollout(payload), payload)
    assert (found["n_joined"], found["n_tokens"]) == (3, 5)
    assert found["samples"][1]["mean_abs"] is None
    json.dumps(found.as_dict(), allow_nan=False)


def test_every_metric_follows_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    mu = -torch.rand(40, generator=generator).double() * 3
    pi = mu + torch.randn(40, generator=generator).double() * 0.3
    split = 17
    payload = builders.v2([[0, 1]], responses=[split, 40 - split])
    dump = builders.rollout(payload)
    for i, part in enumerate((slice(0, split), slice(split, 40))):
        payload["samples"][i].update(
            log_probs=pi[part].float(), tokens=torch.arange(50), total_lengths=50, response_lengths=len(mu[part])
        )
        dump["samples"][i].update(rollout_log_probs=mu[part].float().tolist(), tokens=list(range(50)))
    found = compared(dump, payload)
    mu, pi = mu.float().double(), pi.float().double()
    delta = pi - mu
    rho, size = delta.exp(), delta.abs()
    sums = torch.stack([delta[:split].sum(), delta[split:].sum()])
    means = torch.stack([delta[:split].mean(), delta[split:].mean()])
    difference = (pi.exp() - mu.exp()).abs()
    expected = {
        "k1": -delta.mean(),
        "k2": (delta**2).mean() / 2,
        "k3": (rho - delta - 1).mean(),
        "ess": rho.sum() ** 2 / (40 * (rho**2).sum()),
        "token_mult_prob_error": size.exp().mean(),
        "chi2_token": (rho**2).mean() - 1,
        "chi2_seq": (2 * sums).exp().mean() - 1,
        "seq_ratio": sums.exp().mean(),
        "geo_ratio": means.exp().mean(),
        "ppl_ratio": (-means).exp().mean(),
        "train_rollout_logprob_abs_diff": (size[:split].mean() + size[split:].mean()) / 2,
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(float(value), rel=1e-9), name
    assert found["prob_diff"]["mean"] == pytest.approx(float(difference.mean()))
    assert found["prob_diff"]["std"] == pytest.approx(float(difference.std(correction=0)))
    correlation = torch.corrcoef(torch.stack([pi.exp(), mu.exp()]))[0, 1]
    assert found["prob_diff"]["pearson"] == pytest.approx(float(correlation))
    for name, fraction in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        assert found["abs_diff"][name] == pytest.approx(float(size.quantile(fraction)), rel=1e-6)
    assert found["tis"]["clip_fraction"] == pytest.approx(float((rho > 2).double().mean()))
    assert found["tis"]["mean_weight"] == pytest.approx(float(rho.clamp(max=2).mean()))
    inside = (rho >= 0.5) & (rho <= 2)
    assert found["icepop"]["dropped_fraction"] == pytest.approx(float((~inside).double().mean()))
    assert found["veto"]["dropped_fraction"] == 0


def test_drift_is_by_decile_turn_and_log_prob() -> None:
    mask = [1, 1, 0, 0, 1, 1, 0, 1, 1, 1]
    rollout = [-0.05, -1.5, 0.0, 0.0, -3.0, -6.0, 0.0, -12.0, -30.0, -0.7]
    train = torch.tensor(rollout)
    train[4:6] += 0.5
    train[7:] -= 1.0
    found = compared(*pair(rollout, train, mask=mask))["drift"]
    assert [row["decile"] for row in found["decile"]] == [0, 1, 4, 5, 7, 8, 9]
    assert [(row["turn"], row["n_tokens"], row["mean"]) for row in found["turn"]] == [
        (0, 2, 0.0),
        (1, 2, 0.5),
        (2, 3, pytest.approx(-1.0, abs=1e-6)),
    ]
    bins = {(row["from"], row["to"]): row["n_tokens"] for row in found["log_prob"]}
    expected = {(None, -20): 1, (-20, -10): 1, (-10, -5): 1, (-5, -2): 1, (-2, -1): 1, (-1, -0.5): 1, (-0.1, None): 1}
    assert bins == expected


def test_turns_do_not_run_on_from_one_sample_into_the_next() -> None:
    payload = builders.v2([[0, 1]])
    found = compared(builders.rollout(payload), payload)
    assert [(row["turn"], row["n_tokens"]) for row in found["drift"]["turn"]] == [(0, 6)]


def ages(dump: dict[str, Any], payload: dict[str, Any]) -> list[tuple[int, int]]:
    return [(row["staleness"], row["n_tokens"]) for row in compared(dump, payload)["drift"]["staleness"]]


@pytest.mark.parametrize("rollout_id", [0, 7, 200])
def test_staleness_counts_updates_back_from_the_newest_weights_that_are_known(rollout_id: int) -> None:
    payload = builders.v2(provenance=True)
    payload["rollout_id"] = rollout_id
    dump = builders.rollout(payload)
    for sample, versions in zip(dump["samples"], (["3"], ["1", "3"], [], None), strict=True):
        sample["weight_versions"] = versions
    assert ages(dump, payload) == [(0, 3), (2, 3)]
    for shard in payload["dp_shards"]:
        shard["provenance"]["weight_version"] = 4
    assert ages(dump, payload) == [(1, 3), (3, 3)]


def test_the_worst_tokens_say_where_they_are() -> None:
    dump, payload = pair([-1.0, -2.0, -3.0], torch.tensor([-1.0, -4.0, -3.5]))
    worst = compared(dump, payload)["worst"]
    assert [(one["token"], one["token_id"], one["abs_diff"]) for one in worst] == [(1, 4, 2.0), (2, 5, 0.5)]


def test_an_evaluation_is_never_compared_with_training() -> None:
    payload = builders.v2()
    with pytest.raises(DumpFormatError, match="evaluation"):
        compare(rollout_dump_of(Path("eval_7.pt"), builders.rollout(payload)), train_dump_of(Path("7.pt"), payload))


def test_the_record_is_what_the_attributes_say() -> None:
    payload = builders.v2()
    found = compared(builders.rollout(payload), payload)
    assert json.loads(json.dumps(found.as_dict())) == found.as_dict()
    assert found.n_joined == found["n_joined"] == 4
    assert found.metrics.abs_diff.mean == found["abs_diff"]["mean"]
    assert [one.position for one in found.samples] == [one["position"] for one in found["samples"]]
    with pytest.raises(KeyError):
        _ = found["no_such_metric"]


def test_any_train_field_can_be_held_against_the_rollout() -> None:
    dump, payload = pair([-1.0, -2.0], torch.tensor([-1.5, -2.5]))
    payload["samples"][0]["ref_log_probs"] = torch.tensor([-1.25, -2.25])
    source, trained = rollout_dump_of(Path("7.pt"), dump), train_dump_of(Path("7.pt"), payload)
    found = compare(source, trained, field="ref_log_probs")
    assert found["abs_diff"]["mean"] == 0.25
    assert found["log_probs"]["field"] == "ref_log_probs"
    with pytest.raises(DumpFormatError, match=r"log_probs, ref_log_probs.*found 'reflogprobs'"):
        compare(source, trained, field="reflogprobs")


@pytest.mark.parametrize("far", [800.0, 1e20])
def test_log_probs_above_0_are_named_and_leave_strict_json(far: float) -> None:
    n = 40
    found = compared(*pair([-0.5 - 0.01 * i for i in range(n)], torch.full((n,), far)))
    assert found["n_tokens"] == n
    assert found["abs_diff"]["max"] == pytest.approx(far, rel=1e-2)
    assert found["prob_diff"] == dict.fromkeys(("mean", "max", "std", "pearson"))
    assert "prob_diff.mean" in found["overflowed"]
    assert found.value("token_mult_prob_error") == math.inf
    assert [one.code for one in found.findings] == ["positive-log-probs"]
    json.dumps(found.as_dict(), allow_nan=False)


@pytest.mark.parametrize("stated", [10**6, 10**12, 2**62])
def test_a_stated_length_takes_no_more_memory_than_the_values_that_are_there(stated: int) -> None:
    dump, payload = pair([-1.0, -2.0], torch.tensor([-1.5, -2.5]))
    dump["samples"][0]["response_length"] = payload["samples"][0]["response_lengths"] = stated
    found = compared(dump, payload)
    assert found["n_tokens"] == 0
    assert found["warnings"]


@pytest.mark.parametrize("odd", ["²", "--5", "", "1" * 5000, 10**30, None, 1.5, [3]])
def test_weight_versions_that_are_no_numbers_are_not_known(odd: Any) -> None:
    dump, payload = pair([-1.0, -2.0], torch.tensor([-1.5, -2.5]), weight_versions=[odd])
    assert compared(dump, payload)["drift"]["staleness"] == []
    dump["samples"][0]["weight_versions"] = [odd, "3"]
    assert [one["staleness"] for one in compared(dump, payload)["drift"]["staleness"]] == [0]
