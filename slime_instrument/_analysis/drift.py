"""Where the mismatch grows: by relative position, by turn, by log μ, and by weight staleness."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from slime_instrument._analysis.blocks import Block
from slime_instrument._analysis.table import TokenTable
from slime_instrument._format.values import as_list, whole_number, whole_number_in

LOG_PROB_EDGES = (-20.0, -10.0, -5.0, -2.0, -1.0, -0.5, -0.1)
MAX_TURNS = 32
"""Turns from this one on are one bin."""


@dataclass(frozen=True)
class Bin:
    """Comparable tokens that have something in common.

    Attributes:
        key: what: the tenth of the response (0 to 9), the number of the turn, the lower edge of log μ (None for the
            lowest bin), or the age of the weights in updates.
        n_tokens: how many.
        mean, mean_abs: of δ and of \\|δ\\|.
    """

    key: float | None
    n_tokens: int
    mean: float
    mean_abs: float


@dataclass(frozen=True)
class Drift:
    """Where the mismatch grows: by tenth of the response, by turn, by log μ, by weight staleness. Bins without a
    comparable token are left out."""

    decile: tuple[Bin, ...]
    turn: tuple[Bin, ...]
    log_prob: tuple[Bin, ...]
    staleness: tuple[Bin, ...]

    def as_dict(self) -> dict[str, list[dict[str, Any]]]:
        """As ``--json`` has it."""
        upper = dict(itertools.pairwise((None, *LOG_PROB_EDGES, None)))
        named: dict[str, list[dict[str, Any]]] = {}
        for what in fields(self):
            named[what.name] = rows = []
            for one in getattr(self, what.name):
                values = asdict(one)
                key = values.pop("key")
                bounds = {"from": key, "to": upper[key]} if what.name == "log_prob" else {what.name: key}
                rows.append({**bounds, **values})
        return named


class _Bins:
    """Tokens, Σδ and Σ\\|δ\\| of numbered bins."""

    def __init__(self, keys: Sequence[float | None]) -> None:
        self.keys = keys
        self.counts, self.signed, self.size = torch.zeros(3, len(keys), dtype=torch.float64)

    def result(self) -> tuple[Bin, ...]:
        columns = zip(self.keys, self.counts.tolist(), self.signed.tolist(), self.size.tolist(), strict=True)
        return tuple(
            Bin(key, int(count), signed / count, size / count) for key, count, signed, size in columns if count
        )


class DriftSums:
    """Adds up the groups of :class:`Drift` block by block."""

    def __init__(self, table: TokenTable, trainer_version: int | None) -> None:
        self._table, self._staleness = table, staleness_of(table, trainer_version)
        self._deciles, self._turns = _Bins(range(10)), _Bins(range(MAX_TURNS))
        self._log_probs = _Bins([None, *LOG_PROB_EDGES])

    def add(self, block: Block) -> None:
        """Take up a block that has comparable tokens."""
        self._add_deciles(block)
        self._add_turns(block)
        self._add_log_probs(block)

    def result(self) -> Drift:
        # All tokens of a pair have one age, and the sums of the pairs are the table's.
        pairs = self._table.pair_sums
        ages = _Bins(sorted({age for age in self._staleness if age is not None}))
        for i, age in enumerate(ages.keys):
            own = torch.tensor([one == age for one in self._staleness])
            ages.counts[i] = pairs.counts[own].sum()
            ages.signed[i], ages.size[i] = pairs.signed[own].sum(), pairs.size[own].sum()
        return Drift(self._deciles.result(), self._turns.result(), self._log_probs.result(), ages.result())

    def _add_deciles(self, block: Block) -> None:
        # Token i of n belongs to tenth 10 i // n: the tenths are runs, which end before ceil(k n / 10).
        groups, lengths = self._deciles, block.lengths.unsqueeze(1)
        ends = (lengths * torch.arange(1, 11) + 9) // 10 + (block.lengths.cumsum(0).unsqueeze(1) - lengths)
        counts = block.counts_between(ends)
        groups.counts += counts.sum(0)
        groups.signed += block.sums(block.delta, counts).sum(0)
        groups.size += block.sums(block.size, counts).sum(0)

    def _add_turns(self, block: Block) -> None:
        groups = self._turns
        if bool(block.mask.all()):
            groups.counts[0] += len(block)
            groups.signed[0] += block.delta.sum()
            groups.size[0] += block.size.sum()
            return
        turn = turns(block.mask, block.lengths)
        turn = (turn if block.chosen is None else turn[block.chosen]).clamp_(max=MAX_TURNS - 1)
        groups.counts += torch.bincount(turn, minlength=MAX_TURNS)
        groups.signed += torch.bincount(turn, weights=block.delta, minlength=MAX_TURNS)
        groups.size += torch.bincount(turn, weights=block.size, minlength=MAX_TURNS)

    def _add_log_probs(self, block: Block) -> None:
        groups = self._log_probs
        above = torch.ones(len(block), dtype=torch.bool)
        for i, upper in enumerate((*LOG_PROB_EDGES, torch.inf)):
            rest = block.rollout >= upper if i < len(LOG_PROB_EDGES) else torch.zeros_like(above)
            inside = (above & ~rest).double()
            groups.counts[i] += inside.sum()
            groups.signed[i] += block.delta @ inside
            groups.size[i] += block.size @ inside
            above = rest


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


def staleness_of(table: TokenTable, trainer_version: int | None = None) -> list[int | None]:
    """Of each pair, how many weight updates older than the newest weights the oldest weights are that sampled it.

    The newest weights are the trainer's own where the train dump knows them, else the newest that sampled any of the
    pairs. Engines count updates, and start again when a run is resumed, so the rollout's number says nothing here.
    None where a sample does not know its versions.
    """
    known = [known_versions(pair.rollout) for pair in table.pairs]
    newest = max((max(versions) for versions in known if versions), default=0)
    if trainer_version is not None:
        newest = max(newest, trainer_version)
    return [newest - min(versions) if versions else None for versions in known]


def known_versions(sample: Mapping[str, Any]) -> list[int]:
    """The weight versions of a rollout sample that are whole numbers; engines write them as strings."""
    stored = as_list(sample.get("weight_versions")) or ()
    numbers = (whole_number_in(value) if isinstance(value, str) else whole_number(value) for value in stored)
    return [number for number in numbers if number is not None]
