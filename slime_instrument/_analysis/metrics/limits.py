"""Parameters of the corrections that are simulated, and what every family does with its results."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["Limits", "finite"]


@dataclass(frozen=True)
class Limits:
    """Parameters of the corrections; the defaults are those that slime's arguments and papers name.

    Attributes:
        tis: upper bound of a truncated weight.
        icepop: token weights outside become 0.
        geo: sequences whose geometric mean ratio is outside are dropped.
        veto: sequences with a token ratio below are dropped.
    """

    tis: float = 2.0
    icepop: tuple[float, float] = (0.5, 2.0)
    geo: tuple[float, float] = (0.99, 1.001)
    veto: float = 1e-4


def finite(value: torch.Tensor | float) -> float | None:
    """A number, or None for what JSON has no number for."""
    number = float(value)
    return number if math.isfinite(number) else None
