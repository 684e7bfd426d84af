"""Measuring block by block gives what measuring all at once gives, wherever the blocks end."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_instrument._analysis import blocks
from slime_instrument._analysis.compare import compare
from slime_instrument._analysis.drift import turns
from slime_instrument._analysis.metrics import measure, per_sample, worst_tokens
from slime_instrument._analysis.table import TokenTable, tabulate
from slime_instrument._format.join import Pair
from tests.analysis import seeded

VALUES = st.sampled_from([-0.1, -0.5, -3.0, -12.0, -700.0, 0.0, math.nan, -math.inf])


@st.composite
def tables(draw: st.DrawFn) -> TokenTable:
    pairs = []
    for position in range(draw(st.integers(0, 6))):
        n = draw(st.integers(0, 9))
        sides = [torch.tensor(draw(st.lists(VALUES, min_size=n, max_size=n))) for _ in range(2)]
        mask = torch.tensor(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), dtype=torch.int64)
        train = {"response_lengths": n, "total_lengths": n + 1, "loss_masks": mask, "log_probs": sides[0]}
        versions = draw(st.sampled_from([None, ["3"], ["1", "3"]]))
        rollout = {"response_length": n, "rollout_log_probs": sides[1], "weight_versions": versions}
        pairs.append(Pair(position, None, train, rollout, True))
    return tabulate(pairs)


def same(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            same(a, b)
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=1e-9, abs=1e-12)
    else:
        assert one == other


@settings(deadline=None, max_examples=200)
@given(table=tables(), size=st.sampled_from([1, 2, 5, 11]))
def test_metrics_do_not_depend_on_the_blocks(table: TokenTable, size: int) -> None:
    whole: list[Any] = [measure(table).as_dict(), [asdict(one) for one in per_sample(table)], worst_tokens(table)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_TOKENS", size)
        again = tabulate(table.pairs)
        assert sum(1 for _ in again.blocks()) >= math.ceil(len(again.mask) / max(size, 9))
        parts: list[Any] = [measure(again).as_dict(), [asdict(one) for one in per_sample(again)], worst_tokens(again)]
    same(whole[:2], parts[:2])
    same([one.abs_diff for one in whole[2]], [one.abs_diff for one in parts[2]])


@settings(deadline=None, max_examples=100)
@given(table=tables())
def test_deciles_are_those_of_each_token(table: TokenTable) -> None:
    expected: dict[int, list[float]] = {}
    for i in range(len(table.pairs)):
        span = table.tokens_of(i)
        for k in range(int(table.lengths[i])):
            if bool(table.comparable[span][k]):
                difference = float(table.train[span][k].double() - table.rollout[span][k])
                expected.setdefault(k * 10 // int(table.lengths[i]), []).append(difference)
    rows = measure(table).as_dict()["drift"]["decile"]
    assert {row["decile"]: row["n_tokens"] for row in rows} == {k: len(v) for k, v in expected.items()}
    for row in rows:
        values = expected[row["decile"]]
        assert row["mean"] == pytest.approx(sum(values) / len(values), rel=1e-9, abs=1e-12)


@given(st.lists(st.lists(st.booleans(), max_size=8), max_size=5))
@settings(deadline=None)
def test_turns_are_counted_anew_in_each_sample(masks: list[list[bool]]) -> None:
    flat = torch.tensor([one for mask in masks for one in mask], dtype=torch.bool)
    found = turns(flat, torch.tensor([len(mask) for mask in masks], dtype=torch.int64)).tolist()
    place = 0
    for mask in masks:
        turn = -1
        for k, one in enumerate(mask):
            turn += one and not (k and mask[k - 1])
            if one:
                assert found[place + k] == turn
        place += len(mask)


@pytest.mark.parametrize("code", seeded.FAULTS)
def test_findings_do_not_depend_on_the_blocks(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = seeded.faulty(code, seeded.SIZES[1], 0)
    whole = compare(*case.records())
    monkeypatch.setattr(blocks, "BLOCK_TOKENS", 100)
    parts = compare(*case.records())
    same(whole["findings"], parts["findings"])
    assert code in [one["code"] for one in parts["findings"]]


def test_compact_lists_measure_as_lists_do(tmp_path: Path) -> None:
    case = seeded.clean(seeded.SIZES[2], 0)
    torch.save(case.rollout, tmp_path / "rollout.pt")
    torch.save(case.train, tmp_path / "7.pt")
    found = compare(tmp_path / "rollout.pt", tmp_path / "7.pt")
    assert type(found.rollout_dump.samples[0]["tokens"]).__name__ == "Tensor"
    expected = compare(*case.records())
    ours = {key: value for key, value in found.as_dict().items() if key not in ("rollout", "train")}
    same(ours, {key: value for key, value in expected.as_dict().items() if key not in ("rollout", "train")})
