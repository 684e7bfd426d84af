"""What a diagnosis says: findings, each with its estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from slime_instrument._format.values import plain_value


@dataclass(frozen=True)
class Estimate:
    """How large a cause is.

    Attributes:
        name: what is estimated, such as ``temperature``.
        value, low, high: the estimate and its 95 % interval.
        n_tokens: tokens that it rests on.
        needed: the fewest tokens with which this would still have been named, at the same size of the fault.
        looks_like: what else would look the same in these data, in words.
    """

    name: str
    value: float
    low: float
    high: float
    n_tokens: int
    needed: int
    looks_like: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A named cause.

    Attributes:
        code: name of the cause; ``docs/findings.md`` has a section of that name.
        message: what the data shows, with numbers, and what it usually means.
        samples: rollout positions of the samples that show it.
        evidence: the numbers, as plain values.
        tokens: the tokens that this explains, bool, shape ``(N,)``; later findings do not look at them.
        estimate: how large the cause is, where that can be told.
    """

    code: str
    message: str
    samples: tuple[int, ...]
    evidence: Mapping[str, Any] = field(default_factory=dict)
    tokens: torch.Tensor | None = None
    estimate: Estimate | None = None

    def as_dict(self) -> dict[str, Any]:
        """Without ``tokens``, as plain values; what is not finite is None."""
        return {
            "code": self.code,
            "message": self.message,
            "samples": list(self.samples),
            "evidence": plain_value(self.evidence),
            "estimate": None if self.estimate is None else plain_value(asdict(self.estimate)),
        }
