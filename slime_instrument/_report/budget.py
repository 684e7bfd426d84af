"""Which samples keep their tokens in the page when not all of them fit."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Block", "Keeper"]

_ALWAYS = 10  # samples with the largest single difference, and as many with the largest mean, of the whole report


@dataclass(frozen=True)
class Block:
    """The packed tokens of one sample, and how bad the sample is.

    Attributes:
        rollout: number of the pair of files in the report.
        position: rollout position of the sample.
        text: base64 of the block.
        ids: the token ids in it, int64.
        rank: how many samples of the same rollout are worse, by mean or by maximum.
        mean_abs, max_abs: of \\|δ\\|; -1 where no token could be compared.
    """

    rollout: int
    position: int
    text: str
    ids: torch.Tensor
    rank: int
    mean_abs: float
    max_abs: float


class Keeper:
    """Holds blocks up to a limit: first the worst of the whole report, then the worst of each rollout, and so on.

    Args:
        limit: bytes that the blocks may take at most; what is certain to be beyond is let go at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._blocks: list[Block] = []
        self._size = 0
        self.offered = 0

    def offer(self, block: Block) -> None:
        self._blocks.append(block)
        self._size += len(block.text)
        self.offered += 1
        if self._size > 3 * self._limit:  # a long run must not hold every block until its end
            self._blocks = self.kept(self._limit)
            self._size = sum(len(one.text) for one in self._blocks)

    def kept(self, space: int) -> list[Block]:
        """What fits into so many bytes, by rollout and position. The worst sample of all is kept whatever its size."""
        by_max = sorted(self._blocks, key=lambda one: -one.max_abs)[:_ALWAYS]
        by_mean = sorted(self._blocks, key=lambda one: -one.mean_abs)[:_ALWAYS]
        worst = {(one.rollout, one.position) for one in by_max + by_mean}
        order = sorted(
            self._blocks,
            key=lambda one: (
                (one.rollout, one.position) not in worst,
                one.rank,
                -one.max_abs,
                one.rollout,
                one.position,
            ),
        )
        chosen: list[Block] = []
        size = 0
        for block in order:
            if size + len(block.text) <= space or not chosen:
                chosen.append(block)
                size += len(block.text)
        return sorted(chosen, key=lambda one: (one.rollout, one.position))
