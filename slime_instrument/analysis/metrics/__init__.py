"""Mismatch metrics, one file per family. All of them are functions of a :class:`TokenTable` and give plain values."""

from __future__ import annotations

from typing import Any

from slime_instrument.analysis.metrics.difference import abs_diff, prob_diff, sequence_mean_abs_diff
from slime_instrument.analysis.metrics.divergence import divergences
from slime_instrument.analysis.metrics.drift import by_decile, by_log_prob, by_staleness, by_turn
from slime_instrument.analysis.metrics.weights import Limits, ess, sequence_ratios, weights
from slime_instrument.analysis.table import TokenTable

__all__ = ["measure"]


def measure(table: TokenTable, rollout_id: int | None, limits: Limits) -> dict[str, Any]:
    """Every metric of one pair of dumps. None, never 0.0 or NaN, where there is nothing to measure."""
    return {
        "abs_diff": abs_diff(table),
        "train_rollout_logprob_abs_diff": sequence_mean_abs_diff(table),
        "prob_diff": prob_diff(table),
        **divergences(table),
        **sequence_ratios(table),
        "ess": ess(table),
        **weights(table, limits),
        "excluded": table.excluded(),
        "drift": {
            "decile": by_decile(table),
            "turn": by_turn(table),
            "log_prob": by_log_prob(table),
            "staleness": by_staleness(table, rollout_id),
        },
    }
