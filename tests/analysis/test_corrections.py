"""Corrections against the frameworks' own functions, and what is said about them."""

from __future__ import annotations

import json
import math

import pytest
import torch

from slime_instrument._analysis.corrections import PRESETS, UnknownPolicy, parse_policy, parse_sweep
from tests.analysis import frameworks

POLICIES = frameworks.policies()
TOLERANCE = 1e-6


def assert_equal(mine: torch.Tensor, theirs: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(mine.double(), theirs.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def lacking(policy: str) -> str | None:
    framework = POLICIES[policy].framework
    return None if frameworks.checkout(framework) else f"no checkout of {framework} in $SLIME_FRAMEWORKS"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((kind, torch.float64) for kind in frameworks.batches()), ("overflow", torch.float32), ("wide", torch.float32)],
)
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_gives_every_token_the_weight_that_its_framework_gives_it(
    name: str, kind: str, dtype: torch.dtype
) -> None:
    if (reason := lacking(name)) is not None:
        pytest.skip(reason)
    policy, batch = POLICIES[name], frameworks.batches(dtype)[kind]
    root = frameworks.checkout(policy.framework)
    assert root is not None
    if not frameworks.comparable(policy, kind):
        return
    theirs = frameworks.CALLERS[policy.framework](policy, batch, root)
    mine = policy.apply(batch)
    shown = batch.mask
    if policy.framework == "prime-rl":
        shown = shown & ~theirs.effective.isnan() & ~mine.effective.isnan()
    assert_equal(mine.effective[shown], theirs.effective.detach()[shown])
    for key, value in theirs.reported.items():
        # A mean that overflows in the framework's float32 does not in ours.
        if not math.isinf(value):
            assert mine.reported[key] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE, nan_ok=True), key


def test_vectors_kept_from_the_frameworks_are_met_without_their_checkouts() -> None:
    vectors = json.loads(frameworks.VECTORS.read_text())
    assert set(vectors) == set(POLICIES)
    for name, by_batch in vectors.items():
        for kind, kept in by_batch.items():
            batch = frameworks.batches()[kind]
            mine = POLICIES[name].apply(batch)
            theirs = torch.tensor([float(value) for value in kept["effective"]], dtype=torch.float64)
            found = mine.effective[batch.mask]
            if POLICIES[name].framework == "prime-rl":
                theirs, found = theirs.nan_to_num(), found.nan_to_num()
            assert_equal(found, theirs)
            for key, value in kept["reported"].items():
                assert mine.reported[key] == pytest.approx(float(value), rel=TOLERANCE, abs=TOLERANCE, nan_ok=True)


def test_every_framework_of_the_presets_is_called_or_said_to_be_read_only() -> None:
    read_only = {"–", "SkyRL", "OpenRLHF", "AReaL"}
    assert {one.framework for one in PRESETS.values()} == set(frameworks.CALLERS) | read_only


def test_a_dropped_token_counts_as_dropped_and_a_bounded_one_as_clipped() -> None:
    batch = frameworks.batches()["wide"]
    ratio = (batch.train - batch.rollout).exp()
    tis, icepop = PRESETS["slime-tis"].apply(batch), PRESETS["slime-icepop"].apply(batch)
    assert torch.equal(tis.clipped, ratio > 2.0)
    assert bool(tis.kept.all())
    assert torch.equal(~icepop.kept, ratio > 2.0)
    assert not bool(icepop.clipped.any())
    assert int((ratio > 2.0).sum()) > 0


def test_an_overflow_is_a_weight_of_zero_in_nemo_rl_and_the_bound_in_slime() -> None:
    batch = frameworks.batches(torch.float32)["overflow"]
    huge = (batch.train - batch.rollout) > 80
    assert int(huge.sum()) == 1
    assert PRESETS["nemo-rl-tis"].apply(batch).effective[huge].tolist() == [0.0]
    assert PRESETS["slime-tis"].apply(batch).effective[huge].tolist() == [2.0]


def test_bounds_of_verls_k1_act_on_the_inverse_of_the_ratio() -> None:
    batch = frameworks.batches()["wide"]
    kept = parse_policy("verl-geo-rs:rollout_rs=token_k1,rollout_rs_threshold=0.25_10").apply(batch).kept
    ratio = (batch.train - batch.rollout).exp()
    assert torch.equal(kept[batch.mask], ((1 / ratio >= 0.25) & (1 / ratio <= 10))[batch.mask])


@pytest.mark.parametrize(
    ("text", "parameters"),
    [
        ("slime-tis", {"tis_clip": 2.0, "tis_clip_low": 0.0}),
        ("slime-tis:tis_clip=3", {"tis_clip": 3.0, "tis_clip_low": 0.0}),
        ("trl:vllm_importance_sampling_clip_max=none", {"vllm_importance_sampling_clip_max": None}),
        ("mis:use_rs=false,tis_mode=clip", {"use_rs": False, "tis_mode": "clip"}),
        ("verl-geo-rs:rollout_rs_threshold=0.5_2.0", {"rollout_rs_threshold": "0.5_2.0"}),
        (
            "verl-geo-rs:rollout_rs=token_k1,seq_max_k2,rollout_rs_threshold=0.5_2.0,3",
            {"rollout_rs": "token_k1,seq_max_k2", "rollout_rs_threshold": "0.5_2.0,3"},
        ),
    ],
)
def test_a_policy_is_named_with_its_own_parameters(text: str, parameters: dict[str, object]) -> None:
    policy = parse_policy(text)
    assert {key: policy.parameters[key] for key in parameters} == parameters


def test_a_sweep_is_one_policy_for_each_value() -> None:
    swept = parse_sweep("slime-icepop:tis_clip_low=0.5,tis_clip=1.5,2,4").policies
    assert [dict(one.parameters) for one in swept] == [
        {"tis_clip": value, "tis_clip_low": 0.5} for value in (1.5, 2.0, 4.0)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "tis",
        "slime-tis:clip=2",
        "verl-geo-rs:rollout_rs=seq_mean_k4",
        "mis:tis_mode=drop",
        "roll-weight:weight_type=all",
    ],
)
def test_what_means_nothing_is_refused_with_what_would_mean_something(text: str) -> None:
    with pytest.raises(UnknownPolicy, match=r"expected .* found"):
        parse_policy(text).apply(frameworks.batches()["ordinary"])


def test_a_sweep_without_values_is_refused() -> None:
    with pytest.raises(UnknownPolicy, match="--sweep"):
        parse_sweep("slime-tis:tis_clip=")
