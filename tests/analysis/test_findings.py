"""Seeded faults are named, each by its own name and no other; clean pairs are not named at all."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from slime_instrument._analysis import findings
from slime_instrument._analysis.compare import compare
from slime_instrument._analysis.diagnosis import Finding, View

sys.path.insert(0, str(Path(__file__).parent))
import seeded

DOCS = Path(__file__).parents[2] / "docs" / "findings.md"


def codes(case: seeded.Case) -> list[str]:
    return [finding["code"] for finding in compare(*case.records())["findings"]]


def diagnosis(case: seeded.Case) -> list[Finding]:
    return compare(*case.records()).diagnosis


@pytest.mark.parametrize("size", seeded.SIZES, ids=lambda size: size.name)
@pytest.mark.parametrize("code", seeded.FAULTS)
def test_a_seeded_fault_has_its_own_name_and_no_other(code: str, size: seeded.Size) -> None:
    for seed in seeded.SEEDS:
        found = compare(*seeded.faulty(code, size, seed).records())["findings"]
        assert [finding["code"] for finding in found] == [code], seed
        assert found[0]["samples"]
        assert found[0]["evidence"]


@pytest.mark.parametrize("size", seeded.SIZES, ids=lambda size: size.name)
@pytest.mark.parametrize("kind", seeded.CLEAN)
def test_a_clean_pair_has_no_finding(kind: str, size: seeded.Size) -> None:
    for seed in seeded.SEEDS:
        assert codes(seeded.CLEAN[kind](size, seed)) == [], seed


@pytest.mark.parametrize("size", seeded.SIZES, ids=lambda size: size.name)
@pytest.mark.parametrize("kind", seeded.ROUNDED)
def test_values_that_were_rounded_before_they_were_stored_are_named_under_any_noise(
    kind: str, size: seeded.Size
) -> None:
    for seed in seeded.SEEDS:
        found = diagnosis(seeded.ROUNDED[kind](size, seed))
        assert [(one.code, one.evidence["side"], one.evidence["dtype"]) for one in found] == [
            ("dtype-rounding", "rollout", "bfloat16")
        ], seed


def test_two_faults_have_two_names() -> None:
    case = seeded.faulty("temperature", seeded.SIZES[1], 0)
    seeded.non_finite(case)
    assert sorted(codes(case)) == ["non-finite", "temperature"]


def test_where_a_constant_and_a_ratio_fit_alike_one_is_named_and_the_other_said() -> None:
    case = seeded.exact(seeded.SIZES[1], 0, turns=False)
    for sample, source in zip(case.train["samples"], case.rollout["samples"], strict=True):
        n = sample["response_lengths"]
        flat = -2.0 + 0.002 * torch.randn(n, generator=case.random)
        source["rollout_log_probs"] = flat.tolist()
        sample["log_probs"] = flat * 1.1
    (found,) = diagnosis(case)
    assert found.code == "temperature"
    assert found.estimate is not None
    assert any("truncated" in one for one in found.estimate.looks_like)


def test_values_that_have_nothing_to_do_with_each_other_are_a_mismatch_without_a_cause() -> None:
    for seed in range(5):
        case = seeded.exact(seeded.SIZES[1], seed, turns=False)
        for sample in case.train["samples"]:
            n = sample["response_lengths"]
            sample["log_probs"] = -4 - torch.rand(n, generator=case.random) * 2
        for source in case.rollout["samples"]:
            source["rollout_log_probs"] = (-4 * torch.rand(source["response_length"], generator=case.random)).tolist()
        assert codes(case) == ["unexplained-mismatch"], seed


def test_samples_that_exchanged_their_values_are_named_by_position() -> None:
    case = seeded.exact(seeded.SIZES[1], 1, turns=False)
    samples = case.train["samples"]
    samples[3]["rollout_position"], samples[9]["rollout_position"] = 9, 3
    found = compare(*case.records())["findings"]
    assert [(finding["code"], finding["samples"]) for finding in found] == [("sample-swap", [3, 9])]


def test_the_edges_are_those_of_the_size_that_the_dump_names() -> None:
    case = seeded.faulty("cp-boundary", seeded.SIZES[1], 0)
    for shard in case.train["dp_shards"]:
        shard["provenance"] = {"context_parallel": 2}
    found = compare(*case.records())["findings"]
    assert found[0]["evidence"]["context_parallel"] == 2
    for shard in case.train["dp_shards"]:
        shard["provenance"] = {"context_parallel": 1}
    assert "cp-boundary" not in codes(case)


def test_certain_tokens_may_be_exactly_zero() -> None:
    case = seeded.exact(seeded.SIZES[1], 2)
    for sample, source in zip(case.train["samples"], case.rollout["samples"], strict=True):
        source["rollout_log_probs"] = [max(value, -0.02) for value in source["rollout_log_probs"]]
        sample["log_probs"] = torch.tensor(source["rollout_log_probs"]).clone()
        sample["log_probs"][::3] = 0.0
    assert codes(case) == []


def test_every_kind_is_documented_and_stands_in_the_table_where_its_order_is() -> None:
    orders = [kind.order for kind in findings.KINDS]
    assert orders == sorted(orders)
    exact = {"missing-log-probs", "positive-log-probs"}
    declared = [kind.code for kind in findings.KINDS]
    declared.remove("cp-boundary")  # looked for twice: all values in another order, and some at the edges
    assert len(declared) == len(set(declared))
    assert set(declared) == {*seeded.FAULTS, *exact, "sampling-penalty", "context-differs", "unexplained-mismatch"}
    last = ["rollout-log-probs-differ", "mask-differs"]
    sections = re.findall(r"^## ([a-z-]+)$", DOCS.read_text(), re.MULTILINE)
    assert sorted(sections) == sorted([*declared, *last])


def test_what_a_kind_finds_has_the_code_of_its_row() -> None:
    cases = [seeded.faulty(code, seeded.SIZES[1], 0) for code in seeded.FAULTS]
    for found in (compare(*case.records()) for case in cases):
        view = View(found.rollout_dump, found.train_dump, found.joined, found.table)
        for kind in findings.KINDS:
            finding = kind.find(view)
            assert finding is None or finding.code == kind.code


def test_deleting_one_row_removes_that_finding_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rest = tuple(kind for kind in findings.KINDS if kind.code != "temperature")
    monkeypatch.setattr(findings, "KINDS", rest)
    assert codes(seeded.faulty("non-finite", seeded.SIZES[0], 0)) == ["non-finite"]
    assert "temperature" not in codes(seeded.faulty("temperature", seeded.SIZES[0], 0))
