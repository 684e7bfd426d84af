"""Estimates of divergences between rollout and training policy, over tokens and over sequences."""

from __future__ import annotations

import torch

from slime_instrument.analysis.metrics.weights import finite, sequence_sums
from slime_instrument.analysis.table import TokenTable

__all__ = ["MULT_PROB_ERROR_ALARM", "divergences"]

MULT_PROB_ERROR_ALARM = 1.05
"""Above this ``token_mult_prob_error`` is worth an alarm."""


def divergences(table: TokenTable) -> dict[str, float | None]:
    """k1, k2, k3 for KL(μ‖π), token_mult_prob_error, chi2_token and chi2_seq.

    None without a comparable token, and where the value exceeds what a float holds.
    """
    delta = table.delta
    if not len(delta):
        return dict.fromkeys(("k1", "k2", "k3", "token_mult_prob_error", "chi2_token", "chi2_seq"))
    sums = sequence_sums(table)
    return {
        "k1": finite(-delta.mean()),
        "k2": finite(delta.square().mean() / 2),
        # expm1: for small δ ratio - 1 and δ cancel.
        "k3": finite((torch.expm1(delta) - delta).mean()),
        "token_mult_prob_error": finite(delta.abs().exp_().mean()),
        "chi2_token": finite(torch.expm1(2 * delta).mean()),
        "chi2_seq": finite(torch.expm1(2 * sums).mean()),
    }
