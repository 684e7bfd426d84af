"""What every pair adds up to: the sums that most metrics and findings are made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from slime_instrument._analysis.blocks import Block

__all__ = ["PairSums"]


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
