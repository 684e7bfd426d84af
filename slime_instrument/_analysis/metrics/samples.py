"""Metrics of each sample, and the tokens that differ most."""

from __future__ import annotations

from typing import Any

import torch

from slime_instrument._analysis.table import KINDS, TokenTable
from slime_instrument._format.values import integers

__all__ = ["per_sample", "worst_tokens"]


def per_sample(table: TokenTable) -> list[dict[str, Any]]:
    """One record per joined sample. Means are None where no token is comparable."""
    sums = table.pair_sums
    counts = sums.counts
    n_masked = table.counts_of(table.kind == KINDS.index("masked"))
    columns = zip(
        table.pairs,
        table.lengths.tolist(),
        counts.long().tolist(),
        n_masked.tolist(),
        (sums.size / counts).tolist(),
        sums.largest.tolist(),
        (sums.signed / counts).tolist(),
        table.removed.tolist(),
        strict=True,
    )
    return [
        {
            "position": pair.position,
            "index": pair.index,
            "response_length": length,
            "n_tokens": count,
            "masked": hidden,
            "mean_abs": mean if count else None,
            "max_abs": top if count else None,
            "mean": offset if count else None,
            "removed": removed,
            "confirmed": pair.confirmed,
        }
        for pair, length, count, hidden, mean, top, offset, removed in columns
    ]


def worst_tokens(table: TokenTable, n: int = 10) -> list[dict[str, Any]]:
    """The tokens with the largest \\|δ\\|: where they are, both log-probs and the token id (None where not stored)."""
    largest: list[tuple[float, int]] = []
    for block in table.blocks():
        size, chosen = block.size.topk(min(n, len(block)))
        where = chosen if block.chosen is None else block.chosen.nonzero().flatten()[chosen]
        largest += zip(size.tolist(), (where + block.tokens.start).tolist(), strict=True)
        largest = sorted(largest, key=lambda one: -one[0])[:n]
    worst = []
    for value, token in largest:
        if value == 0:
            break
        # The last pair that starts there: those before it have no tokens.
        i = int(torch.searchsorted(table.starts, token, right=True)) - 1
        pair, place = table.pairs[i], token - int(table.starts[i])
        tokens = integers(pair.train.get("tokens"))
        id_at = len(tokens) - int(table.lengths[i]) + place if tokens is not None else -1
        worst.append(
            {
                "position": pair.position,
                "index": pair.index,
                "token": place,
                "token_id": int(tokens[id_at]) if tokens is not None and 0 <= id_at < len(tokens) else None,
                "rollout": float(table.rollout[token]),
                "train": float(table.train[token]),
                "abs_diff": value,
            }
        )
    return worst
