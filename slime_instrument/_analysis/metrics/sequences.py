"""Metrics that are means over sequences."""

from __future__ import annotations

from slime_instrument._analysis.blocks import Block
from slime_instrument._analysis.metrics.limits import finite
from slime_instrument._analysis.table import TokenTable

__all__ = ["Sequences"]

_CLAMP = 20.0  # of the exponent of a sequence ratio, as in slime


class Sequences:
    """slime's own ``train_rollout_logprob_abs_diff`` (mean of \\|δ\\| per sequence, then over sequences), seq_ratio
    (exponent clamped to ±20), geo_ratio and ppl_ratio."""

    def __init__(self, table: TokenTable) -> None:
        self.table = table

    def add(self, block: Block) -> None:
        """Nothing: the sums of the pairs are the table's."""

    def record(self) -> dict[str, float | None]:
        pairs = self.table.pair_sums
        present = pairs.present
        if not bool(present.any()):
            return dict.fromkeys(("train_rollout_logprob_abs_diff", "seq_ratio", "geo_ratio", "ppl_ratio"))
        counts, sums, sizes = (part[present] for part in (pairs.counts, pairs.signed, pairs.size))
        return {
            "train_rollout_logprob_abs_diff": finite((sizes / counts).mean()),
            "seq_ratio": finite(sums.clamp(-_CLAMP, _CLAMP).exp().mean()),
            "geo_ratio": finite((sums / counts).exp().mean()),
            "ppl_ratio": finite((-sums / counts).exp().mean()),
        }
