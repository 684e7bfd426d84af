"""What a finding is found in, and what it says: the view of two dumps, and findings, each with its estimate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch

from slime_instrument._analysis.blocks import Block, PairSums
from slime_instrument._analysis.statistics import percentiles
from slime_instrument._analysis.table import TokenTable
from slime_instrument._format.dumps import RolloutDump, TrainDump
from slime_instrument._format.join import Join
from slime_instrument._format.values import plain_value


@dataclass(frozen=True)
class Estimate:
    """How large a cause is.

    Attributes:
        name: what is estimated, such as ``temperature``.
        value, low, high: the estimate and its interval; docs/findings.md says which one.
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


@dataclass(frozen=True)
class View:
    """Everything that a finding may look at.

    Attributes:
        rollout, train: the dumps.
        join: who belongs to whom.
        table: the tokens of the joined pairs.
        explained: tokens that an earlier finding accounts for, bool, shape ``(N,)``; None before the first one.
        memo: what findings of this view share; never handed on to another view.
    """

    rollout: RolloutDump
    train: TrainDump
    join: Join
    table: TokenTable
    explained: torch.Tensor | None = None
    memo: dict[str, Any] = field(default_factory=dict, compare=False)

    @cached_property
    def open(self) -> torch.Tensor:
        """Comparable tokens that nothing explains yet, bool, shape ``(N,)``. ``K`` counts them."""
        return self.table.comparable if self.explained is None else self.table.comparable & ~self.explained

    @cached_property
    def n_open(self) -> int:
        """``K``."""
        return int(self.pair_sums.counts.sum())

    @cached_property
    def delta(self) -> torch.Tensor:
        """δ of the open tokens, float64, shape ``(K,)``. For few tokens: what looks at all of them takes blocks."""
        return self.train_values().double().sub_(self.rollout_values())

    @cached_property
    def size(self) -> torch.Tensor:
        """\\|δ\\| of the open tokens, float32, shape ``(K,)``."""
        return self.table.size if self.explained is None else self.table.size[self.open[self.table.comparable]]

    @cached_property
    def sample(self) -> torch.Tensor:
        """Pair of each open token, int64, shape ``(K,)``."""
        return self.table.sample[self.open].long()

    @cached_property
    def pair_sums(self) -> PairSums:
        """Counts and sums of the open tokens of each pair."""
        if self.explained is None:
            return self.table.pair_sums
        return PairSums.of(self.blocks(), len(self.table.lengths))

    @property
    def counts(self) -> torch.Tensor:
        """Open tokens of each pair, float64, shape ``(S,)``."""
        return self.pair_sums.counts

    @cached_property
    def mean_abs(self) -> torch.Tensor:
        """mean \\|δ\\| over the open tokens of each pair; NaN for a pair without one. Shape ``(S,)``."""
        return self.pair_sums.size / self.pair_sums.counts

    @cached_property
    def noise(self) -> float:
        """Median \\|δ\\| of the open tokens: what is usual in this pair of dumps. 0.0 without any."""
        return percentiles(self.size, (0.5,))[0] if self.n_open else 0.0

    def blocks(self) -> Iterator[Block]:
        """The open tokens, block by block."""
        return self.table.blocks(self.open)

    def rollout_values(self) -> torch.Tensor:
        """log μ of the open tokens, float32, shape ``(K,)``."""
        return self.table.rollout if self.n_open == len(self.open) else self.table.rollout[self.open]

    def train_values(self) -> torch.Tensor:
        """log π of the open tokens, float32, shape ``(K,)``."""
        return self.table.train if self.n_open == len(self.open) else self.table.train[self.open]

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sums of a ``(K,)`` tensor over each pair, float64, shape ``(S,)``."""
        return torch.bincount(self.sample, weights=values, minlength=len(self.table.lengths)).double()

    def positions(self, pairs: torch.Tensor | list[int]) -> tuple[int, ...]:
        """Rollout positions of pairs, given by their numbers or as a ``(S,)`` bool tensor, in order and each once."""
        if isinstance(pairs, torch.Tensor):
            pairs = pairs.nonzero().flatten().tolist() if pairs.dtype == torch.bool else pairs.tolist()
        return tuple(sorted({self.table.pairs[i].position for i in pairs}))

    def positions_with(self, tokens: torch.Tensor) -> tuple[int, ...]:
        """Rollout positions of the pairs that have any of the tokens, bool, shape ``(N,)``."""
        return self.positions(self.pairs_with(tokens))

    def pairs_with(self, tokens: torch.Tensor) -> list[int]:
        """Numbers of the pairs that have any of the tokens, bool, shape ``(N,)``; in order."""
        return [int(i) for i in self.table.counts_of(tokens).nonzero().flatten()]

    def tokens_of(self, pairs: torch.Tensor | list[int]) -> torch.Tensor:
        """All tokens of pairs, given by their numbers or as a ``(S,)`` bool tensor: bool, shape ``(N,)``."""
        chosen = torch.zeros(len(self.table.lengths), dtype=torch.bool)
        chosen[pairs] = True
        return chosen.repeat_interleave(self.table.lengths)
