"""How far the two log-probs are apart: on the scale of log-probs and on that of probabilities."""

from __future__ import annotations

import math

import torch

from slime_instrument._analysis.blocks import Block
from slime_instrument._analysis.metrics.limits import finite
from slime_instrument._analysis.percentiles import percentiles
from slime_instrument._analysis.table import TokenTable

__all__ = ["AbsDiff", "ProbDiff"]


class AbsDiff:
    """mean, max, p50, p95 and p99 of \\|δ\\|, in nats; all None without a comparable token."""

    def __init__(self, table: TokenTable) -> None:
        self.table, self.n, self.total, self.largest = table, 0, 0.0, 0.0

    def add(self, block: Block) -> None:
        if len(block):
            self.n += len(block)
            self.total += float(block.size.sum())
            self.largest = max(self.largest, float(block.size.max()))

    def record(self) -> dict[str, float | None]:
        if not self.n:
            return dict.fromkeys(("mean", "max", "p50", "p95", "p99"))
        p50, p95, p99 = percentiles(self.table.size, (0.50, 0.95, 0.99))
        return {"mean": self.total / self.n, "max": self.largest, "p50": p50, "p95": p95, "p99": p99}


class _Moments:
    """Number, means, and sums of products of deviations from the means, of two variables, added up part by part."""

    def __init__(self) -> None:
        self.n = 0
        self.mean = torch.zeros(2, dtype=torch.float64)
        self.products = torch.zeros(2, 2, dtype=torch.float64)

    def add(self, values: torch.Tensor) -> None:
        """``values``: float64, shape ``(2, k)``, k > 0; they are overwritten."""
        k = values.shape[1]
        mean = values.mean(1)
        values -= mean.unsqueeze(1)
        # Sums of squares would cancel; the deviations of two parts combine exactly (Chan, Golub and LeVeque).
        between = (mean - self.mean).outer(mean - self.mean) * (self.n * k / (self.n + k))
        self.products += values @ values.T + between
        self.mean += (mean - self.mean) * (k / (self.n + k))
        self.n += k


class ProbDiff:
    """mean, max and std of \\|π - μ\\|, and the Pearson correlation of π and μ (None where one does not vary).

    None too where a log-prob is so far above 0 that its probability is no number.
    """

    def __init__(self) -> None:
        self.both, self.sizes, self.largest = _Moments(), _Moments(), 0.0

    def add(self, block: Block) -> None:
        if not len(block):
            return
        both = torch.stack([block.train, block.rollout]).double().exp_()
        size = (both[0] - both[1]).abs_()
        self.largest = max(self.largest, float(size.max()))
        self.sizes.add(torch.stack([size, size]))
        self.both.add(both)

    def record(self) -> dict[str, float | None]:
        n = self.both.n
        if not n:
            return dict.fromkeys(("mean", "max", "std", "pearson"))
        products = self.both.products
        scale = math.sqrt(max(0.0, float(products[0, 0]) * float(products[1, 1])))
        return {
            "mean": finite(self.sizes.mean[0]),
            "max": finite(self.largest),
            "std": finite((self.sizes.products[0, 0] / n).sqrt()),
            "pearson": finite(products[0, 1] / scale) if scale > 0 else None,
        }
