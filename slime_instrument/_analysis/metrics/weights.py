"""Importance weights: effective sample size, and what the corrections that slime offers would do with them."""

from __future__ import annotations

from typing import Any

import torch

from slime_instrument._analysis.blocks import Block
from slime_instrument._analysis.metrics.limits import Limits, finite
from slime_instrument._analysis.table import TokenTable

__all__ = ["EffectiveSize", "Weights"]


class EffectiveSize:
    """Effective sample size of the token weights, as a fraction of the tokens: (Σρ)² / (N Σρ²)."""

    def __init__(self) -> None:
        self.n = 0
        self.scale = -torch.inf
        self.total = self.squares = torch.zeros((), dtype=torch.float64)

    def add(self, block: Block) -> None:
        if not len(block):
            return
        # Scaling all weights alike changes nothing and keeps the largest from overflowing.
        largest = float(block.delta.max())
        scale = max(self.scale, largest)
        weight = (block.delta - scale).exp_()
        shrunk = torch.tensor(self.scale - scale, dtype=torch.float64).exp()
        self.total = self.total * shrunk + weight.sum()
        self.squares = self.squares * shrunk.square() + weight @ weight
        self.scale, self.n = scale, self.n + len(block)

    def record(self) -> float | None:
        return finite(self.total.square() / (self.n * self.squares)) if self.n else None


class Weights:
    """What TIS, IcePop, geometric rejection and veto would do: shares of tokens or sequences between 0 and 1."""

    def __init__(self, table: TokenTable, limits: Limits) -> None:
        self.table, self.limits, self.n = table, limits, 0
        self.vetoed = torch.zeros(len(table.lengths), dtype=torch.bool)
        self.truncated, self.clipped, self.off, self.kept, self.dropped = torch.zeros(5, dtype=torch.float64)

    def add(self, block: Block) -> None:
        if not len(block):
            return
        rho, (low, high) = block.excess + 1, self.limits.icepop
        self.n += len(block)
        self.truncated += rho.clamp(max=self.limits.tis).sum()
        self.clipped += (rho > self.limits.tis).sum()
        self.off += block.excess.abs().sum()
        outside = (rho < low) | (rho > high)
        self.dropped += outside.sum()
        self.kept += rho.masked_fill(outside, 0.0).sum()
        if float(rho.min()) < self.limits.veto:
            self.vetoed[block.pairs] = block.sums((rho < self.limits.veto).double()) > 0

    def record(self) -> dict[str, Any]:
        n, limits, pairs = self.n, self.limits, self.table.pair_sums
        if not n:
            return dict.fromkeys(("tis", "icepop", "geo_rs", "veto"))
        present = pairs.present
        geo = (pairs.signed[present] / pairs.counts[present]).exp()
        return {
            "tis": {
                "limit": limits.tis,
                "mean_weight": finite(self.truncated / n),
                "clip_fraction": finite(self.clipped / n),
                "mean_abs_rho_minus_1": finite(self.off / n),
            },
            "icepop": {
                "limits": list(limits.icepop),
                "mean_weight": finite(self.kept / n),
                "dropped_fraction": finite(self.dropped / n),
            },
            "geo_rs": {
                "limits": list(limits.geo),
                "dropped_fraction": finite(((geo < limits.geo[0]) | (geo > limits.geo[1])).double().mean()),
            },
            "veto": {"limit": limits.veto, "dropped_fraction": finite(self.vetoed[present].double().mean())},
        }
