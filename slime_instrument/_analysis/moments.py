"""What δ = log π - log μ must obey at tokens sampled from μ, and the estimates that follow from it.

Write ρ = exp δ. Three identities hold position by position, whatever the two distributions are:

- E[ρ] is the mass of π on what μ could sample: 1 for every full distribution, less where sampling was truncated.
- With another temperature, log π = r log μ + c, where c belongs to the position and not to the token. So
  E[(ρ - 1) c] = 0, and from c = δ - (r - 1) log μ follows r - 1 = E[(ρ - 1) δ] / E[(ρ - 1) log μ].
- The same r - 1 is the slope of δ on log μ wherever c varies little beside log μ: among improbable tokens.

Independent noise in δ makes the first estimate of r - 1 too large and leaves the slope alone; differences of entropy
among positions make the slope too small. Together they enclose r, and where they disagree it is no temperature.
Every sum is kept by sample: tokens of one sample are not independent; samples are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch

from slime_instrument._analysis.blocks import Block
from slime_instrument._analysis.statistics import log_student_tail

__all__ = ["IMPROBABLE", "Moments", "Ratio", "mean_of", "slope_of"]

IMPROBABLE = -2.0
"""log μ below which a token counts as improbable: there c varies less than log μ does."""

_UNSURE = -0.05  # log μ
_EXACT = 1e9  # standard errors of what has none
_CHANCE = math.log(1e-3)
_LARGEST = 5.0  # |δ| is cut here, in nats: one token of no probability must not decide a mean of exponentials


@dataclass(frozen=True)
class Ratio:
    """A quantity estimated from samples: ``value``, its standard error, and over how many samples it was formed."""

    value: float
    error: float
    n_samples: int

    @property
    def t(self) -> float:
        """How many standard errors the value is away from 0; 0 where nothing is known."""
        if not math.isfinite(self.value) or not math.isfinite(self.error):
            return 0.0
        if self.error == 0:
            return math.copysign(_EXACT, self.value) if self.value else 0.0
        return self.value / self.error

    def beyond(self, errors: float) -> bool:
        """Whether the value is that many standard errors from 0, and further than so few samples show by chance."""
        df = torch.tensor(float(self.n_samples - 1))
        return abs(self.t) >= errors and float(log_student_tail(torch.tensor(self.t), df)) < _CHANCE


@dataclass(frozen=True)
class Moments:
    """Sums over the open tokens of each pair; all float64 of shape ``(S,)``.

    ``excess`` is ρ - 1; ``reverse`` is 1/ρ - 1, for tokens that were sampled from π instead.

    Attributes:
        n: tokens.
        delta, size, square: Σδ, Σ\\|δ\\| and Σδ².
        scale: Σ(1 - μ), the size of δ that an error of one nat in a token's logit causes.
        excess, gain: Σ(ρ - 1), and of its positive part alone.
        excess_delta, excess_rollout: Σ(ρ - 1)δ and Σ(ρ - 1) log μ.
        reverse_delta, reverse_rollout: Σ(1/ρ - 1)δ and Σ(1/ρ - 1) log μ.
        low_n, low_x, low_y, low_xx, low_xy: of improbable tokens: how many, the sums of x = log μ, y = δ, x², xy.
        certain: tokens whose log μ is exactly 0.
        unsure, lower: tokens that were not nearly certain, and those of them with δ below 0.
    """

    n: torch.Tensor
    delta: torch.Tensor
    size: torch.Tensor
    square: torch.Tensor
    scale: torch.Tensor
    excess: torch.Tensor
    gain: torch.Tensor
    excess_delta: torch.Tensor
    excess_rollout: torch.Tensor
    reverse_delta: torch.Tensor
    reverse_rollout: torch.Tensor
    low_n: torch.Tensor
    low_x: torch.Tensor
    low_y: torch.Tensor
    low_xx: torch.Tensor
    low_xy: torch.Tensor
    certain: torch.Tensor
    unsure: torch.Tensor
    lower: torch.Tensor

    @classmethod
    def of(cls, blocks: Iterable[Block], n_pairs: int) -> Moments:
        """Add up all blocks of a table."""
        found = cls(*torch.zeros(len(fields(cls)), n_pairs, dtype=torch.float64))
        for block in blocks:
            if not len(block):
                continue
            x, y = block.rollout.double(), block.delta.clamp(-_LARGEST, _LARGEST)
            excess, reverse = torch.expm1(y), torch.expm1(-y)
            unsure = x < _UNSURE
            low = (x < IMPROBABLE).double()
            low_x, low_y = x * low, y * low
            values = {
                "delta": y, "size": y.abs(), "square": y * y, "scale": -torch.expm1(x.clamp(max=0.0)), "excess": excess,
                "gain": excess.clamp(min=0.0), "excess_delta": excess * y, "excess_rollout": excess * x,
                "reverse_delta": reverse * y, "reverse_rollout": reverse * x, "low_n": low, "low_x": low_x,
                "low_y": low_y, "low_xx": low_x * x, "low_xy": low_x * y, "certain": (x == 0).double(),
                "unsure": unsure.double(), "lower": (unsure & (y < 0)).double(),
            }  # fmt: skip
            found.n[block.pairs] = block.counts.double()
            for name, each in values.items():
                getattr(found, name)[block.pairs] = block.sums(each)
        return found

    def only(self, pairs: torch.Tensor) -> Moments:
        """Of the pairs that a ``(S,)`` bool tensor names."""
        return Moments(*(getattr(self, one.name)[pairs] for one in fields(self)))

    def total(self, name: str) -> float:
        """The sum of one attribute over all pairs."""
        return float(getattr(self, name).sum())

    @property
    def mass(self) -> Ratio:
        """E[ρ] - 1."""
        return mean_of(self.excess, self.n)

    @property
    def gain_over_loss(self) -> float:
        """Positive part of ρ - 1 over its negative part: 1 for two full distributions, 0 where training's probability
        is always the smaller one."""
        gain = self.total("gain")
        loss = gain - self.total("excess")
        return gain / loss if loss > 0 else math.inf

    @property
    def slope(self) -> Ratio:
        """r - 1 as the slope of δ on log μ among improbable tokens."""
        return slope_of(self.low_n, self.low_x, self.low_y, self.low_xx, self.low_xy)

    def temperature(self, *, reverse: bool = False) -> Ratio:
        """r - 1 from E[(ρ - 1) c] = 0; ``reverse``: as it is where the tokens were sampled from π."""
        if reverse:
            return mean_of(self.reverse_delta, self.reverse_rollout)
        return mean_of(self.excess_delta, self.excess_rollout)


def mean_of(numerator: torch.Tensor, denominator: torch.Tensor) -> Ratio:
    """Σnumerator / Σdenominator over samples, with the standard error that the spread of the samples gives it."""
    total = float(denominator.sum())
    n = int(denominator.count_nonzero())
    if total == 0 or n < 2:
        return Ratio(math.nan, math.nan, n)
    value = float(numerator.sum()) / total
    influence = (numerator - value * denominator) / total
    return Ratio(value, math.sqrt(float(influence.square().sum()) * n / (n - 1)), n)


def slope_of(n: torch.Tensor, x: torch.Tensor, y: torch.Tensor, xx: torch.Tensor, xy: torch.Tensor) -> Ratio:
    """Least-squares slope with an intercept, from the sums of each sample."""
    count = float(n.sum())
    if count < 3:
        return Ratio(math.nan, math.nan, int(n.count_nonzero()))
    mean_x, mean_y = float(x.sum()) / count, float(y.sum()) / count
    spread = xx - 2 * mean_x * x + n * mean_x**2
    together = xy - mean_x * y - mean_y * x + n * (mean_x * mean_y)
    return mean_of(together, spread)
