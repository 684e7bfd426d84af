"""Faults that act where they act in an engine, on tokens that were really sampled: named, measured, nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from slime_instrument._analysis.compare import compare
from slime_instrument._analysis.diagnosis import Finding

sys.path.insert(0, str(Path(__file__).parent))
from simulated import Fault, Pair, Shape, pair

SHAPES = {"noisy": Shape(kernel=0.09), "sure of its tokens": Shape(sure=0.75, sharpness=0.8, kernel=0.02)}
ENGINE, TRAINER = (0.7, 0.9, 1.1, 1.3), (0.8,)


def diagnosis(made: Pair) -> list[Finding]:
    return compare(*made.records()).diagnosis


def found(fault: Fault, shape: Shape, seed: int = 1) -> dict[str, Finding]:
    return {one.code: one for one in diagnosis(pair(fault, shape, seed))}


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    made: Shape = request.param
    return made


@pytest.mark.parametrize(
    ("fault", "ratio"),
    [(Fault(engine_temperature=t), t) for t in ENGINE] + [(Fault(train_temperature=t), 1 / t) for t in TRAINER],
)
def test_a_temperature_is_measured(fault: Fault, ratio: float, shape: Shape) -> None:
    named = found(fault, shape)
    assert list(named) == ["temperature"]
    estimate = named["temperature"].estimate
    assert estimate is not None
    assert estimate.low <= ratio <= estimate.high
    assert abs(estimate.value - ratio) < 0.1
    assert 0 < estimate.needed < estimate.n_tokens == 48 * 48


def test_with_entropies_in_the_dump_a_temperature_is_exact(shape: Shape) -> None:
    estimate = found(Fault(engine_temperature=0.8, entropy=True), shape)["temperature"].estimate
    assert estimate is not None
    assert abs(estimate.value - 0.8) < 0.01
    assert estimate.low <= 0.8 <= estimate.high
    assert estimate.high - estimate.low == pytest.approx(0.02)


def test_log_probs_logged_before_the_temperature_say_that_the_tokens_are_not_theirs(shape: Shape) -> None:
    named = found(Fault(engine_temperature=0.7, train_temperature=0.7, raw_log_probs=True), shape)
    assert list(named) == ["temperature"]
    assert named["temperature"].evidence["sampled_from"] == "train"
    assert abs(named["temperature"].evidence["ratio"] - 1 / 0.7) < 0.1


@pytest.mark.parametrize(
    "fault",
    [Fault(top_p=0.7), Fault(top_p=0.95), Fault(top_k=20), Fault(top_k=50), Fault(min_p=0.05), Fault(min_p=0.2)],
    ids=str,
)
def test_truncation_is_one_sided_and_the_mean_ratio_is_the_mass_kept(fault: Fault, shape: Shape) -> None:
    named = found(fault, shape)
    assert list(named) == ["truncated-sampling"]
    estimate = named["truncated-sampling"].estimate
    assert estimate is not None
    assert max(fault.top_p if fault.top_p < 1 else 0.0, 0.5) < estimate.value < 1


@pytest.mark.parametrize(
    "fault", [Fault(repetition=1.1), Fault(repetition=1.3), Fault(presence=0.6), Fault(frequency=0.4)], ids=str
)
def test_a_penalty_shows_in_the_tokens_that_the_context_holds(fault: Fault, shape: Shape) -> None:
    named = found(fault, shape)
    assert list(named) == ["sampling-penalty"]
    assert (
        named["sampling-penalty"].evidence["mean_ratio_new"] < 1 < named["sampling-penalty"].evidence["mean_ratio_seen"]
    )


def test_a_strong_penalty_is_no_truncation_although_the_mean_ratio_is_below_1() -> None:
    # What would restore the mean are repeated tokens, and the penalty has made those rare.
    unsure = Shape(sure=0.1, sharpness=2.0)
    for seed in range(4):
        assert list(found(Fault(repetition=2.0), unsure, seed)) == ["sampling-penalty"], seed


def test_another_context_fades_along_the_response(shape: Shape) -> None:
    assert list(found(Fault(context=1.0), shape)) == ["context-differs"]


@pytest.mark.parametrize("precision", [0.25, 1.5])
def test_what_is_too_large_and_has_no_cause_is_said_to_be_so(precision: float, shape: Shape) -> None:
    named = found(Fault(precision=precision), shape)
    assert list(named) == ["unexplained-mismatch"]
    assert f"{8 if precision < 1 else 4} bits" in named["unexplained-mismatch"].message


def test_a_clean_pair_has_no_finding(shape: Shape) -> None:
    for seed in range(4):
        assert found(Fault(), shape, seed) == {}, seed


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault(engine_temperature=0.8, share=0.33), "temperature"),
        (Fault(top_p=0.85, share=0.4), "truncated-sampling"),
        (Fault(repetition=1.2, share=0.5), "sampling-penalty"),
        (Fault(precision=0.5, share=0.3), "unexplained-mismatch"),
        (Fault(stale=0.3, share=0.4), "stale-weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_of_some_samples_is_named_for_those(fault: Fault, code: str, shape: Shape) -> None:
    made = pair(fault, shape, 2)
    (finding,) = diagnosis(made)
    assert finding.code == code
    wrong = set(finding.samples) ^ set(made.concerned)
    assert len(wrong) <= 3


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 0.95), (0.8, 0.9), (0.9, 0.9), (1.2, 0.85)])
def test_one_cause_does_not_hide_another(temperature: float, top_p: float, shape: Shape) -> None:
    named = found(Fault(engine_temperature=temperature, top_p=top_p), shape)
    assert sorted(named) == ["temperature", "truncated-sampling"]
    estimate = named["temperature"].estimate
    assert estimate is not None
    assert abs(estimate.value - temperature) < 0.1
    assert estimate.low <= temperature <= estimate.high


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 0.95), (8, 0.9), (20, 0.95)])
def test_two_truncations_are_no_temperature_although_they_tie_delta_to_log_mu(
    top_k: int, top_p: float, shape: Shape
) -> None:
    assert list(found(Fault(top_k=top_k, top_p=top_p), shape)) == ["truncated-sampling"]


@pytest.mark.parametrize("side", ["rollout", "train"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_short_type_shows_in_the_bits_under_noise(side: str, dtype: torch.dtype, shape: Shape) -> None:
    fault = Fault(rollout_dtype=dtype) if side == "rollout" else Fault(train_dtype=dtype)
    named = found(fault, shape)
    assert list(named) == ["dtype-rounding"]
    assert (named["dtype-rounding"].evidence["side"], f"torch.{named['dtype-rounding'].evidence['dtype']}") == (
        side,
        str(dtype),
    )


def test_a_finding_can_be_written_as_json(shape: Shape) -> None:
    record = found(Fault(engine_temperature=0.8), shape)["temperature"].as_dict()
    assert record["estimate"]["name"] == "temperature"
    assert isinstance(record["estimate"]["looks_like"], list)
    assert isinstance(record["samples"], list)
