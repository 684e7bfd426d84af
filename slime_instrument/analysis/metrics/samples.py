"""Metrics of each sample, and the tokens that differ most."""

from __future__ import annotations

from typing import Any

import torch

from slime_instrument.analysis.arrays import integers
from slime_instrument.analysis.table import KINDS, TokenTable

__all__ = ["per_sample", "worst_tokens"]


def per_sample(table: TokenTable) -> list[dict[str, Any]]:
    """One record per joined sample. Means are None where no token is comparable."""
    counts = table.counts
    n = len(counts)
    size = table.delta.abs()
    largest = torch.zeros(n, dtype=torch.float64).scatter_reduce_(0, table.sample_of_delta, size, "amax")
    total, signed = table.per_sample_sum(size), table.per_sample_sum(table.delta)
    masked = table.kind == KINDS.index("masked")
    n_masked = torch.bincount(table.sample[masked], minlength=n)
    columns = zip(
        table.pairs,
        table.lengths.tolist(),
        counts.long().tolist(),
        n_masked.tolist(),
        (total / counts).tolist(),
        largest.tolist(),
        (signed / counts).tolist(),
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
    if not len(table.delta):
        return []
    size, chosen = table.delta.abs().topk(min(n, len(table.delta)))
    where = table.comparable.nonzero().flatten()[chosen]
    worst = []
    for token, value in zip(where.tolist(), size.tolist(), strict=True):
        if value == 0:
            break
        i = int(table.sample[token])
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
