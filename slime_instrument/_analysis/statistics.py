"""Exact percentiles without sorting, and how sure a pattern is: upper bounds of tail probabilities, as logarithms so
that they never underflow."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch


def log_student_tail(t: torch.Tensor, df: torch.Tensor) -> torch.Tensor:
    """Upper bound of log P(\\|T\\| > t) of Student's distribution, elementwise; 0 where ``df`` < 1.

    The density's own tail, integrated without its 1: exact in the limit of large t, too large (so: cautious) below.
    """
    t, df = t.abs().double().clamp(min=1e-12), df.double()
    safe = df.clamp(min=1.0)
    scale = torch.lgamma((safe + 1) / 2) - torch.lgamma(safe / 2) - 0.5 * (safe * math.pi).log()
    # n = df: the integral of (1 + x²/n)^-(n+1)/2 from t is at most (1 + t²/n)^-(n-1)/2 / t * n/(n-1); n/t for n = 1.
    shrunk = -(safe - 1) / 2 * torch.log1p(t.square() / safe)
    factor = torch.where(safe > 1, safe / (safe - 1).clamp(min=0.5), safe)
    bound = math.log(2) + scale + shrunk - t.log() + factor.log()
    return torch.where(df >= 1, bound.clamp(max=0.0), torch.zeros_like(bound))


def log_all_hit(hits: int, n: int, rate: float) -> float:
    """Upper bound (Chernoff) of log P(at least ``hits`` of ``n``), each with probability ``rate``."""
    if n == 0 or hits <= n * rate:
        return 0.0
    share = hits / n
    bound = 0.0
    if share > 0:
        bound += share * math.log(rate / share) if rate > 0 else -math.inf
    if share < 1:
        bound += (1 - share) * math.log((1 - rate) / (1 - share))
    return n * bound


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
