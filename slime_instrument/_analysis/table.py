"""All joined response tokens as flat tensors. Everything that is measured is measured on these.

``N`` counts the response tokens of all pairs one after another, ``S`` the pairs, ``M`` the comparable tokens: mask 1 on
the train side and a usable log-prob on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from slime_instrument._analysis.blocks import Block, blocks_of
from slime_instrument._analysis.sums import PairSums
from slime_instrument._format.join import Pair

__all__ = ["FILLER", "KINDS", "TokenTable"]

KINDS = ("comparable", "masked", "missing", "nan", "inf", "filler", "removed")
"""What a token is; its number in :attr:`TokenTable.kind`. A token that is several things is the first that applies,
in the order masked, missing, nan, inf, filler."""

FILLER = -1e30  # engines write the lowest float of their type for "no value"; no log-prob comes near it


@dataclass(frozen=True)
class TokenTable:
    """The tokens of all joined pairs.

    Attributes:
        pairs: the joined pairs, in the order of their tokens.
        lengths: response lengths, int64, shape ``(S,)``.
        rollout, train: log-probs, float32, shape ``(N,)``; what is missing is NaN.
        mask: loss mask of the train side, bool, shape ``(N,)``.
        rollout_mask: loss mask of the rollout side, bool, shape ``(N,)``; 1 where it has none.
        kind: index into :data:`KINDS`, uint8, shape ``(N,)``.
        removed: which pairs the rollout marked with remove_sample, bool, shape ``(S,)``.
        problems: what could not be used, one sentence each.
        misfits: pair -> log-probs of a length that is not the response's, by side; they take no part.
    """

    pairs: Sequence[Pair]
    lengths: torch.Tensor
    rollout: torch.Tensor
    train: torch.Tensor
    mask: torch.Tensor
    rollout_mask: torch.Tensor
    kind: torch.Tensor
    removed: torch.Tensor
    has_rollout_mask: torch.Tensor
    train_dtypes: frozenset[torch.dtype]
    problems: list[str] = field(default_factory=list)
    misfits: dict[int, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def starts(self) -> torch.Tensor:
        """First token of each pair, int64, shape ``(S,)``."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def sample(self) -> torch.Tensor:
        """Pair of each token, int32, shape ``(N,)``."""
        return torch.arange(len(self.lengths), dtype=torch.int32).repeat_interleave(self.lengths)

    @cached_property
    def comparable(self) -> torch.Tensor:
        """Tokens that count, bool, shape ``(N,)``."""
        return self.kind == 0

    @cached_property
    def pair_sums(self) -> PairSums:
        """Counts and sums of the comparable tokens of each pair."""
        return PairSums.of(self.blocks(), len(self.lengths))

    @cached_property
    def size(self) -> torch.Tensor:
        """\\|δ\\| of the comparable tokens, float32, shape ``(M,)``. For order and counts; sums take :meth:`blocks`."""
        found, place = torch.empty(int(self.pair_sums.counts.sum())), 0
        for block in self.blocks():
            found[place : place + len(block)] = block.size
            place += len(block)
        return found

    @cached_property
    def delta(self) -> torch.Tensor:
        """train - rollout of the comparable tokens, float64, shape ``(M,)``. Large: prefer :meth:`blocks`."""
        parts = [block.delta for block in self.blocks()]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)

    def blocks(self, chosen: torch.Tensor | None = None) -> Iterator[Block]:
        """The table part by part.

        Args:
            chosen: the tokens that count, bool, shape ``(N,)``; by default the comparable ones.
        """
        chosen = self.comparable if chosen is None else chosen
        return blocks_of(self.lengths, self.mask, self.rollout, self.train, chosen)

    def tokens_of(self, pair: int) -> slice:
        """Where the tokens of one pair stand."""
        start = int(self.starts[pair])
        return slice(start, start + int(self.lengths[pair]))

    def counts_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """How many of ``tokens``, bool, shape ``(N,)``, each pair has: int64, shape ``(S,)``."""
        if not bool(tokens.any()):
            return torch.zeros(len(self.lengths), dtype=torch.int64)
        return torch.bincount(self.sample[tokens], minlength=len(self.lengths))

    @cached_property
    def kind_counts(self) -> dict[str, int]:
        """Tokens of each of :data:`KINDS`."""
        return dict(zip(KINDS, torch.bincount(self.kind, minlength=len(KINDS)).tolist(), strict=True))

    def excluded(self) -> dict[str, int]:
        """Tokens by the kind for which they do not count; ``removed`` counts samples."""
        excluded = {kind: n for kind, n in self.kind_counts.items() if kind not in ("comparable", "removed")}
        return {**excluded, "removed": int(self.removed.sum())}
