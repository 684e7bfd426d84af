"""Estimates of divergences between rollout and training policy, over tokens and over sequences."""

from __future__ import annotations

import torch

from slime_instrument._analysis.blocks import Block
from slime_instrument._analysis.metrics.limits import finite
from slime_instrument._analysis.table import TokenTable

__all__ = ["MULT_PROB_ERROR_ALARM", "Divergences"]

MULT_PROB_ERROR_ALARM = 1.05
"""Above this ``token_mult_prob_error`` is worth an alarm."""


class Divergences:
    """k1, k2, k3 for KL(μ‖π), token_mult_prob_error, chi2_token and chi2_seq.

    None without a comparable token, and where the value exceeds what a float holds.
    """

    def __init__(self, table: TokenTable) -> None:
        self.table, self.n = table, 0
        self.signed, self.squares, self.k3, self.error, self.chi2 = torch.zeros(5, dtype=torch.float64)

    def add(self, block: Block) -> None:
        if not len(block):
            return
        delta, excess = block.delta, block.excess
        self.n += len(block)
        self.signed += delta.sum()
        self.squares += delta @ delta
        # The ratio less 1: for small δ ratio - 1 and δ cancel.
        self.k3 += (excess - delta).sum()
        self.error += block.size.exp().sum()
        self.chi2 += torch.expm1(2 * delta).sum()

    def record(self) -> dict[str, float | None]:
        n = self.n
        if not n:
            return dict.fromkeys(("k1", "k2", "k3", "token_mult_prob_error", "chi2_token", "chi2_seq"))
        pairs = self.table.pair_sums
        return {
            "k1": finite(-self.signed / n),
            "k2": finite(self.squares / n / 2),
            "k3": finite(self.k3 / n),
            "token_mult_prob_error": finite(self.error / n),
            "chi2_token": finite(self.chi2 / n),
            "chi2_seq": finite(torch.expm1(2 * pairs.signed[pairs.present]).mean()),
        }
