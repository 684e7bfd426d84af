"""A spike of the gradient norm is put down to the samples that carry it, or to none."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.gradient import Gradient, loss_gradient, spikes, step_norms
from slime_instrument._analysis.pair import joined_pair
from tests.analysis.test_audit import Run

NORMS = [1.0, 1.1, 0.9, 12.0, 1.05, 0.95]


def large(run: Run, *positions: int) -> None:
    for position in positions:
        run.train[position]["advantages"] = run.train[position]["advantages"] * 40


def told(norms: list[float], change: Callable[[Run], None] = lambda _run: None, at: int = 3) -> list[Finding]:
    runs = [Run() for _ in norms]
    change(runs[at])
    names = [f"rollout {i}" for i in range(len(norms))]
    return spikes([{0: norm} for norm in norms], names, lambda i: loss_gradient(runs[i].pair()))


def test_the_samples_that_carry_a_spike_are_named_with_their_part() -> None:
    (found,) = told(NORMS, lambda run: large(run, 11))
    assert found.samples == (11,)
    assert found.evidence["rollout"] == 3
    assert found.evidence["ordinary"] == pytest.approx(1.0)
    share = found.evidence["shares"][0]
    assert share["position"] == 11
    assert f"Position 11 carries {share['share']:.3g} of" in found.message
    (found,) = told(NORMS, lambda run: large(run, 3, 11))
    assert found.samples == (3, 11)


def test_where_all_samples_pull_as_in_other_steps_none_is_named() -> None:
    (found,) = told(NORMS)
    assert found.samples == ()
    assert "No sample carries more than its share; the largest: position" in found.message
    (found,) = told(NORMS, lambda run: large(run, *range(16)))
    assert found.samples == ()
    assert "No sample carries more than its share: 16 of 16 pull more" in found.message


@pytest.mark.parametrize(
    "norms",
    [
        NORMS[:3] + NORMS[4:],
        [1.0, 2.0, 0.5, 1.8, 0.6, 2.9],
        [8.0, 6.5, 5.0, 4.1, 3.2, 2.6, 2.0, 1.6, 1.3, 1.0],
        [1.0, 12.0, 1.0],
    ],
)
def test_scatter_a_slow_fall_and_too_few_steps_are_no_spike(norms: list[float]) -> None:
    assert told(norms, lambda run: large(run, 11), at=1) == []


def test_a_norm_that_is_no_number_stands_out_and_so_does_the_sample_that_made_it() -> None:
    def broken(run: Run) -> None:
        run.train[2]["advantages"] = torch.full_like(run.train[2]["advantages"], math.nan)

    (found,) = told([*NORMS[:3], math.nan, *NORMS[4:]], broken)
    assert found.samples == (2,)


def test_what_is_not_known_of_the_step_is_said() -> None:
    (found,) = told(NORMS, lambda run: run.arguments.update(loss_type="sft_loss"))
    assert "not known: the loss is sft_loss" in found.message
    everything_unknown = Gradient({}, (), {"no arguments": (0,)})
    (found,) = spikes([{0: norm} for norm in NORMS], list("abcdef"), lambda _i: everything_unknown)
    assert "not known: no arguments" in found.message


def test_steps_are_read_from_the_provenance_and_odd_ones_left_out() -> None:
    run = Run()
    pair = run.pair()
    pair.train.dp_shards[0]["provenance"]["steps"] = [
        {"step": 0, "grad_norm": 2.0, "losses": {}},
        {"step": 1, "grad_norm": None, "losses": {}},
        "nonsense",
    ]
    again = joined_pair(pair.rollout, pair.train)
    assert step_norms(again.provenance) == {0: 2.0}
