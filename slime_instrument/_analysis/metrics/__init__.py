"""Mismatch metrics, one file per family.

A family takes up a table block by block and then gives its part of the record, as plain values.
"""

from __future__ import annotations

from typing import Any, Protocol

from slime_instrument._analysis.blocks import Block
from slime_instrument._analysis.metrics.difference import AbsDiff, ProbDiff
from slime_instrument._analysis.metrics.divergence import Divergences
from slime_instrument._analysis.metrics.drift import ByDecile, ByLogProb, ByStaleness, ByTurn
from slime_instrument._analysis.metrics.limits import Limits
from slime_instrument._analysis.metrics.sequences import Sequences
from slime_instrument._analysis.metrics.weights import EffectiveSize, Weights
from slime_instrument._analysis.table import TokenTable

__all__ = ["Family", "Limits", "measure"]


class Family(Protocol):
    """Metrics that are made of the same sums."""

    def add(self, block: Block) -> None:
        """Take up the comparable tokens of some pairs."""

    def record(self) -> Any:
        """What was measured; None, never 0.0 or NaN, where there is nothing to measure."""


def measure(table: TokenTable, rollout_id: int | None, limits: Limits) -> dict[str, Any]:
    """Every metric of one pair of dumps. None, never 0.0 or NaN, where there is nothing to measure."""
    flat: list[Family] = [Divergences(table), Sequences(table), Weights(table, limits)]
    named: dict[str, Family] = {"abs_diff": AbsDiff(table), "prob_diff": ProbDiff(), "ess": EffectiveSize()}
    drift: dict[str, Family] = {
        "decile": ByDecile(),
        "turn": ByTurn(),
        "log_prob": ByLogProb(),
        "staleness": ByStaleness(table, rollout_id),
    }
    for block in table.blocks():
        for family in (*flat, *named.values(), *drift.values()):
            family.add(block)
    record: dict[str, Any] = {name: family.record() for name, family in named.items()}
    for family in flat:
        record |= family.record()
    return {
        **record,
        "excluded": table.excluded(),
        "drift": {name: family.record() for name, family in drift.items()},
    }
