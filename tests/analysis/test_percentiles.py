"""Percentiles are those of a full sort, ties and all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_instrument._analysis.statistics import percentiles

FRACTIONS = (0.99, 0.0, 0.5, 0.95, 1.0, 0.5)


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.5, 100.0]), min_size=1, max_size=60))
def test_percentiles_are_those_of_torch(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float64)
    expected = [float(tensor.quantile(fraction)) for fraction in FRACTIONS]
    assert percentiles(tensor.float(), FRACTIONS) == pytest.approx(expected)
