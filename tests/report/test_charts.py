"""Counts behind the charts: every comparable token stands in exactly one bar and one cell."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_instrument._analysis.compare import compare
from slime_instrument._analysis.table import TokenTable
from slime_instrument._report.page import density, histogram, round_up

from .dumps import one_bad_token, write_run


@pytest.fixture
def table(tmp_path: Path) -> TokenTable:
    folder = write_run(tmp_path, change=one_bad_token)
    return compare(folder / "rollout_data" / "0.pt", folder / "train_data" / "0.pt").table


def test_bars_and_cells_count_every_token_once_and_outliers_at_the_edge(table: TokenTable) -> None:
    bars, cells = histogram(table), density(table)
    assert bars is not None
    assert cells is not None
    assert sum(bars["counts"]) == sum(count for _, _, count in cells["cells"]) == len(table.delta)
    assert bars["counts"][0] >= 1  # the token that is off by −3
    middle = len(bars["counts"]) // 2
    assert sum(bars["counts"][middle - 15 : middle + 16]) > 0.8 * len(table.delta)


def test_without_a_token_there_is_no_chart(tmp_path: Path) -> None:
    folder = write_run(tmp_path, samples=0)
    table = compare(folder / "rollout_data" / "0.pt", folder / "train_data" / "0.pt").table
    assert histogram(table) is None
    assert density(table) is None


@given(st.floats(min_value=1e-6, max_value=1e30))
def test_a_limit_is_a_round_number_just_above(value: float) -> None:
    limit = round_up(value)
    assert value <= limit * (1 + 1e-8)
    assert limit <= 2.5 * value * (1 + 1e-8)
