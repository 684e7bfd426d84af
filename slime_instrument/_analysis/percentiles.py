"""Exact percentiles of many values without sorting them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

__all__ = ["percentiles"]

_BITS = 15  # by the upper half of its bits each float32 falls into one of 32,768 bins, in ascending order
_PART = 1 << 18  # values at a time, so that temporaries stay small


def percentiles(values: torch.Tensor, fractions: tuple[float, ...]) -> list[float]:
    """Percentiles with linear interpolation between neighbours.

    torch.quantile refuses more than 16 million values, and a sort is dear: so the values are counted by the upper half
    of their bits, and only the bin that a percentile falls into is sorted.

    Args:
        values: shape ``(n,)``, n > 0, float32, none negative, none NaN.
        fractions: between 0 and 1, in any order.
    """
    counts = torch.zeros(1 << _BITS, dtype=torch.int64)
    for part in _parts(values):
        # Of numbers that are not negative, those with the larger bit pattern are larger; -0.0 becomes 0.0.
        counts += torch.bincount(part.abs().view(torch.int32) >> 16, minlength=len(counts))
    ends = counts.cumsum(0)
    sorted_bins: dict[int, torch.Tensor] = {}

    def ranked(rank: int) -> float:
        where = int(torch.searchsorted(ends, rank, right=True))
        if where not in sorted_bins:
            low, high = _first_of(where), _first_of(where + 1)
            parts = [part[(part >= low) & ~(part >= high)] for part in _parts(values)]
            sorted_bins[where] = torch.cat(parts).abs().sort().values
        inside = rank - (int(ends[where - 1]) if where else 0)
        return float(sorted_bins[where][inside])

    found = []
    for fraction in fractions:
        place = fraction * (len(values) - 1)
        rank = math.floor(place)
        low = ranked(rank)
        high = ranked(rank + 1) if place > rank else low
        found.append(low + (high - low) * (place - rank))
    return found


def _first_of(where: int) -> torch.Tensor:
    """Lower end of a bin; a NaN behind infinity, which nothing reaches."""
    return torch.tensor(where << 16, dtype=torch.int64).to(torch.int32).view(torch.float32)


def _parts(values: torch.Tensor) -> Iterator[torch.Tensor]:
    return (values[start : start + _PART] for start in range(0, len(values), _PART))
