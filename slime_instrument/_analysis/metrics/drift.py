"""Where the mismatch grows: by relative position, by turn, by log μ, and by weight staleness."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from slime_instrument._analysis.blocks import Block
from slime_instrument._analysis.metrics.limits import finite
from slime_instrument._analysis.table import TokenTable
from slime_instrument._format.values import as_list, whole_number, whole_number_in

__all__ = ["ByDecile", "ByLogProb", "ByStaleness", "ByTurn", "known_versions", "staleness_of", "turns"]

LOG_PROB_EDGES = (-20.0, -10.0, -5.0, -2.0, -1.0, -0.5, -0.1)
MAX_TURNS = 32
"""Turns from this one on are one group."""


class _Groups:
    """Tokens, Σδ and Σ\\|δ\\| of numbered groups."""

    def __init__(self, n: int) -> None:
        self.counts, self.signed, self.size = torch.zeros(3, n, dtype=torch.float64)

    def rows(self) -> list[tuple[int, dict[str, Any]]]:
        """Per group with tokens: its number, how many tokens, mean δ, mean \\|δ\\|."""
        columns = zip(self.counts.tolist(), self.signed.tolist(), self.size.tolist(), strict=True)
        return [
            (i, {"n_tokens": int(count), "mean": finite(signed / count), "mean_abs": finite(size / count)})
            for i, (count, signed, size) in enumerate(columns)
            if count
        ]


class ByDecile(_Groups):
    """mean δ and \\|δ\\| by tenth of the response."""

    def __init__(self) -> None:
        super().__init__(10)

    def add(self, block: Block) -> None:
        # Token i of n belongs to tenth 10 i // n: the tenths are runs, which end before ceil(k n / 10).
        lengths = block.lengths.unsqueeze(1)
        ends = (lengths * torch.arange(1, 11) + 9) // 10 + (block.lengths.cumsum(0).unsqueeze(1) - lengths)
        counts = block.counts_between(ends)
        self.counts += counts.sum(0)
        if len(block):
            self.signed += block.sums(block.delta, counts).sum(0)
            self.size += block.sums(block.size, counts).sum(0)

    def record(self) -> list[dict[str, Any]]:
        return [{"decile": i, **row} for i, row in self.rows()]


class ByTurn(_Groups):
    """mean δ and \\|δ\\| by turn: a contiguous run of mask 1."""

    def __init__(self) -> None:
        super().__init__(MAX_TURNS)

    def add(self, block: Block) -> None:
        if not len(block):
            return
        if bool(block.mask.all()):
            self.counts[0] += len(block)
            self.signed[0] += block.delta.sum()
            self.size[0] += block.size.sum()
            return
        group = turns(block.mask, block.lengths)
        group = (group if block.chosen is None else group[block.chosen]).clamp_(max=MAX_TURNS - 1)
        self.counts += torch.bincount(group, minlength=MAX_TURNS)
        self.signed += torch.bincount(group, weights=block.delta, minlength=MAX_TURNS)
        self.size += torch.bincount(group, weights=block.size, minlength=MAX_TURNS)

    def record(self) -> list[dict[str, Any]]:
        return [{"turn": i, **row} for i, row in self.rows()]


def turns(mask: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Turn of each token, counted from 0 in each sample; meaningless where the mask is 0.

    Args:
        mask: bool, shape ``(n,)``.
        lengths: of the samples, int64, shape ``(P,)``, summing up to n.

    Returns:
        int64, shape ``(n,)``.
    """
    first = (lengths.cumsum(0) - lengths)[lengths > 0]
    before = torch.zeros_like(mask)
    before[1:] = mask[:-1]
    before[first] = False
    started = (mask & ~before).cumsum(0)
    at_start = started[first] - mask[first].long()
    return started - at_start.repeat_interleave(lengths[lengths > 0]) - 1


class ByLogProb(_Groups):
    """mean δ and \\|δ\\| by log μ of the token."""

    def __init__(self) -> None:
        super().__init__(len(LOG_PROB_EDGES) + 1)
        self.bounds: list[float | None] = [None, *LOG_PROB_EDGES, None]

    def add(self, block: Block) -> None:
        above = torch.ones(len(block), dtype=torch.bool)
        for i, upper in enumerate((*LOG_PROB_EDGES, torch.inf)):
            rest = block.rollout >= upper if i < len(LOG_PROB_EDGES) else torch.zeros_like(above)
            inside = (above & ~rest).double()
            self.counts[i] += inside.sum()
            self.signed[i] += block.delta @ inside
            self.size[i] += block.size @ inside
            above = rest

    def record(self) -> list[dict[str, Any]]:
        return [{"from": self.bounds[i], "to": self.bounds[i + 1], **row} for i, row in self.rows()]


class ByStaleness(_Groups):
    """mean δ and \\|δ\\| by weight staleness; empty where no sample knows its weight versions."""

    def __init__(self, table: TokenTable, rollout_id: int | None) -> None:
        self.table, self.staleness = table, staleness_of(table, rollout_id)
        self.values = sorted({value for value in self.staleness if value is not None})
        super().__init__(len(self.values))

    def add(self, block: Block) -> None:
        """Nothing: all tokens of a pair have one age, and the sums of the pairs are the table's."""

    def record(self) -> list[dict[str, Any]]:
        pairs = self.table.pair_sums
        for i, value in enumerate(self.values):
            own = torch.tensor([one == value for one in self.staleness])
            self.counts[i] = pairs.counts[own].sum()
            self.signed[i], self.size[i] = pairs.signed[own].sum(), pairs.size[own].sum()
        return [{"staleness": self.values[i], **row} for i, row in self.rows()]


def staleness_of(table: TokenTable, rollout_id: int | None) -> list[int | None]:
    """rollout_id - min(weight_versions) of each pair; None where one of them is not known."""
    if rollout_id is None:
        return [None] * len(table.pairs)
    found: list[int | None] = []
    for pair in table.pairs:
        known = known_versions(pair.rollout)
        found.append(rollout_id - min(known) if known else None)
    return found


def known_versions(sample: Mapping[str, Any]) -> list[int]:
    """The weight versions of a rollout sample that are whole numbers; engines write them as strings."""
    numbers = map(_version, as_list(sample.get("weight_versions")) or ())
    return [number for number in numbers if number is not None]


def _version(value: Any) -> int | None:
    if isinstance(value, str):
        return whole_number_in(value)
    return whole_number(value)
