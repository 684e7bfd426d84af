"""Importance weights: effective sample size, and what the corrections that slime offers would do with them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from slime_instrument.analysis.table import TokenTable

__all__ = ["Limits", "ess", "finite", "sequence_ratios", "sequence_sums", "weights"]

_CLAMP = 20.0  # of the exponent of a sequence ratio, as in slime


@dataclass(frozen=True)
class Limits:
    """Parameters of the corrections; the defaults are those that slime's arguments and papers name.

    Attributes:
        tis: upper bound of a truncated weight.
        icepop: token weights outside become 0.
        geo: sequences whose geometric mean ratio is outside are dropped.
        veto: sequences with a token ratio below are dropped.
    """

    tis: float = 2.0
    icepop: tuple[float, float] = (0.5, 2.0)
    geo: tuple[float, float] = (0.99, 1.001)
    veto: float = 1e-4


def finite(value: torch.Tensor) -> float | None:
    """A number, or None for what JSON has no number for."""
    number = float(value)
    return number if math.isfinite(number) else None


def sequence_sums(table: TokenTable) -> torch.Tensor:
    """Σδ of each sequence with comparable tokens, float64."""
    return table.per_sample_sum(table.delta)[table.counts > 0]


def ess(table: TokenTable) -> float | None:
    """Effective sample size of the token weights, as a fraction of the tokens: (Σρ)² / (N Σρ²)."""
    delta = table.delta
    if not len(delta):
        return None
    # Scaling all weights alike changes nothing and keeps the largest from overflowing.
    weight = (delta - delta.max()).exp_()
    return finite(weight.sum().square() / (len(weight) * weight.square().sum()))


def sequence_ratios(table: TokenTable) -> dict[str, float | None]:
    """Means over sequences: seq_ratio (exponent clamped to ±20), geo_ratio and ppl_ratio."""
    counts = table.counts[table.counts > 0]
    if not len(counts):
        return dict.fromkeys(("seq_ratio", "geo_ratio", "ppl_ratio"))
    sums = sequence_sums(table)
    return {
        "seq_ratio": finite(sums.clamp(-_CLAMP, _CLAMP).exp().mean()),
        "geo_ratio": finite((sums / counts).exp().mean()),
        "ppl_ratio": finite((-sums / counts).exp().mean()),
    }


def weights(table: TokenTable, limits: Limits) -> dict[str, Any]:
    """What TIS, IcePop, geometric rejection and veto would do: shares of tokens or sequences between 0 and 1."""
    rho = table.delta.exp()
    counts = table.counts[table.counts > 0]
    if not len(rho):
        return {"tis": None, "icepop": None, "geo_rs": None, "veto": None}
    low, high = limits.icepop
    geo = (sequence_sums(table) / counts).exp()
    vetoed = table.per_sample_sum((rho < limits.veto).double())[table.counts > 0] > 0
    return {
        "tis": {
            "limit": limits.tis,
            "mean_weight": finite(rho.clamp(max=limits.tis).mean()),
            "clip_fraction": finite((rho > limits.tis).double().mean()),
            "mean_abs_rho_minus_1": finite((rho - 1).abs_().mean()),
        },
        "icepop": {
            "limits": [low, high],
            "mean_weight": finite(torch.where((rho < low) | (rho > high), 0.0, rho).mean()),
            "dropped_fraction": finite(((rho < low) | (rho > high)).double().mean()),
        },
        "geo_rs": {
            "limits": list(limits.geo),
            "dropped_fraction": finite(((geo < limits.geo[0]) | (geo > limits.geo[1])).double().mean()),
        },
        "veto": {"limit": limits.veto, "dropped_fraction": finite(vetoed.double().mean())},
    }
