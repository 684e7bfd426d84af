"""A table in parts of some hundred thousand tokens, so that whatever is computed on them stays in the cache.

Temporaries of the size of a whole dump cost more time than the arithmetic, and several times the memory of the dump.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

BLOCK_TOKENS = 1 << 18
"""Whole pairs make a block, up to this many tokens; a longer pair is a block of its own."""


@dataclass(frozen=True)
class Block:
    """The tokens of some neighbouring pairs. ``n`` counts them, ``P`` the pairs, ``k`` the tokens that are chosen.

    Attributes:
        pairs: which pairs of the table.
        tokens: which tokens of the table.
        lengths: response lengths, int64, shape ``(P,)``.
        chosen: which tokens count here, bool, shape ``(n,)``; None where all do.
        mask: loss mask of the train side, bool, shape ``(n,)``.
        rollout, train: log-probs of the chosen tokens, float32, shape ``(k,)``.
    """

    pairs: slice
    tokens: slice
    lengths: torch.Tensor
    chosen: torch.Tensor | None
    mask: torch.Tensor
    rollout: torch.Tensor
    train: torch.Tensor

    def __len__(self) -> int:
        return len(self.rollout)

    @cached_property
    def delta(self) -> torch.Tensor:
        """train - rollout, float64, shape ``(k,)``."""
        return self.train.double().sub_(self.rollout)

    @cached_property
    def size(self) -> torch.Tensor:
        """\\|δ\\|, float64, shape ``(k,)``."""
        return self.delta.abs()

    @cached_property
    def excess(self) -> torch.Tensor:
        """The ratio less 1, exact where it is near 0: float64, shape ``(k,)``."""
        return torch.expm1(self.delta)

    @cached_property
    def counts(self) -> torch.Tensor:
        """Chosen tokens of each pair, int64, shape ``(P,)``."""
        if self.chosen is None:
            return self.lengths
        return self.counts_between(self.lengths.cumsum(0))

    def counts_between(self, ends: torch.Tensor) -> torch.Tensor:
        """Chosen tokens up to each of the ``ends``, from the one before it. Ends ascend and count tokens of the block.

        int64 in and out, any shape; read row by row.
        """
        if self.chosen is not None:
            before = torch.zeros(len(self.chosen) + 1, dtype=torch.int64)
            torch.cumsum(self.chosen, 0, out=before[1:])
            ends = before[ends]
        return ends.flatten().diff(prepend=ends.new_zeros(1)).reshape(ends.shape)

    def sums(self, values: torch.Tensor, counts: torch.Tensor | None = None) -> torch.Tensor:
        """Sums of ``values``, float64, shape ``(k,)``, over runs of ``counts`` tokens: by default over each pair."""
        lengths = self.counts if counts is None else counts
        flat: torch.Tensor = torch.segment_reduce(values, "sum", lengths=lengths.flatten(), unsafe=True)
        return flat.reshape(lengths.shape)

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Largest of the non-negative ``values`` of each pair, shape ``(P,)``; 0 for a pair without any."""
        found: torch.Tensor = torch.segment_reduce(values, "max", lengths=self.counts, unsafe=True, initial=0.0)
        return found


def blocks_of(
    lengths: torch.Tensor, mask: torch.Tensor, rollout: torch.Tensor, train: torch.Tensor, chosen: torch.Tensor
) -> Iterator[Block]:
    """All tokens of ``S`` pairs, block by block.

    Args:
        lengths: response lengths, int64, shape ``(S,)``; ``N`` is their sum.
        mask, rollout, train: as in the blocks, but of all tokens, shape ``(N,)``.
        chosen: the tokens that count, bool, shape ``(N,)``.
    """
    ends = lengths.cumsum(0)
    first = start = 0
    while first < len(ends):
        last = max(first + 1, int(torch.searchsorted(ends, start + BLOCK_TOKENS, right=True)))
        tokens = slice(start, int(ends[last - 1]))
        part = chosen[tokens]
        everything = bool(part.all())
        yield Block(
            pairs=slice(first, last),
            tokens=tokens,
            lengths=lengths[first:last],
            chosen=None if everything else part,
            mask=mask[tokens],
            rollout=rollout[tokens] if everything else rollout[tokens][part],
            train=train[tokens] if everything else train[tokens][part],
        )
        first, start = last, tokens.stop


@dataclass(frozen=True)
class PairSums:
    """Sums over the chosen tokens of each pair. All are float64 of shape ``(S,)``.

    Attributes:
        counts: how many tokens.
        signed: Σδ.
        size: Σ\\|δ\\|.
        largest: the largest \\|δ\\|; 0 for a pair without a token.
    """

    counts: torch.Tensor
    signed: torch.Tensor
    size: torch.Tensor
    largest: torch.Tensor

    @classmethod
    def of(cls, blocks: Iterable[Block], n_pairs: int) -> PairSums:
        """Add up all blocks of a table."""
        counts, signed, size, largest = torch.zeros(4, n_pairs, dtype=torch.float64)
        for block in blocks:
            counts[block.pairs] = block.counts.double()
            if len(block):
                signed[block.pairs] = block.sums(block.delta)
                size[block.pairs] = block.sums(block.size)
                largest[block.pairs] = block.largest(block.size)
        return cls(counts, signed, size, largest)

    @property
    def present(self) -> torch.Tensor:
        """Pairs with a token, bool, shape ``(S,)``."""
        return self.counts > 0
