"""How far the two log-probs are apart: on the scale of log-probs and on that of probabilities."""

from __future__ import annotations

import math
from typing import Any

import torch

from slime_instrument.analysis.table import TokenTable

__all__ = ["abs_diff", "percentiles", "prob_diff", "sequence_mean_abs_diff"]


def abs_diff(table: TokenTable) -> dict[str, float | None]:
    """mean, max, p50, p95 and p99 of \\|δ\\|, in nats; all None without a comparable token."""
    size = table.delta.abs().float()  # half the memory; the sums below are taken in float64
    if not len(size):
        return dict.fromkeys(("mean", "max", "p50", "p95", "p99"))
    p50, p95, p99 = percentiles(size, (0.50, 0.95, 0.99))
    return {"mean": float(table.delta.abs().mean()), "max": float(size.max()), "p50": p50, "p95": p95, "p99": p99}


def percentiles(values: torch.Tensor, fractions: tuple[float, ...]) -> list[float]:
    """Percentiles with linear interpolation between neighbours. ``values``: shape ``(n,)``, n > 0, without NaN.

    torch.quantile refuses more than 16 million values, and a full sort is the dearest step of a comparison: so each
    percentile is selected among the values from the previous one upwards.
    """
    found: dict[float, float] = {}
    rest, below, n = values, 0, len(values)
    for fraction in sorted(set(fractions)):
        place = fraction * (n - 1)
        rank = math.floor(place)
        value = rest.kthvalue(rank - below + 1).values
        not_above = below + int((rest <= value).sum())
        following = value if not_above > rank + 1 or rank + 1 == n else rest[rest > value].min()
        found[fraction] = float(value) + (float(following) - float(value)) * (place - rank)
        below += int((rest < value).sum())
        rest = rest[rest >= value]
    return [found[fraction] for fraction in fractions]


def sequence_mean_abs_diff(table: TokenTable) -> float | None:
    """slime's own ``train_rollout_logprob_abs_diff``: mean of \\|δ\\| per sequence, then over sequences."""
    counts = table.counts
    present = counts > 0
    if not bool(present.any()):
        return None
    return float((table.per_sample_sum(table.delta.abs())[present] / counts[present]).mean())


def prob_diff(table: TokenTable) -> dict[str, Any]:
    """mean, max and std of \\|π - μ\\|, and the Pearson correlation of π and μ (None where one does not vary)."""
    train = table.train[table.comparable].double().exp_()
    rollout = table.rollout[table.comparable].double().exp_()
    if not len(train):
        return dict.fromkeys(("mean", "max", "std", "pearson"))
    size = (train - rollout).abs_()
    record = {"mean": float(size.mean()), "max": float(size.max()), "std": float(size.std(correction=0))}
    del size
    train -= train.mean()
    rollout -= rollout.mean()
    scale = math.sqrt(float(train @ train) * float(rollout @ rollout))
    return {**record, "pearson": float(train @ rollout) / scale if scale > 0 else None}
