"""Where the mismatch grows: by relative position, by turn, by log μ, and by weight staleness."""

from __future__ import annotations

import math
from typing import Any

import torch

from slime_instrument.analysis.table import TokenTable
from slime_instrument.files.checks.values import whole_number

__all__ = ["by_decile", "by_log_prob", "by_staleness", "by_turn", "staleness_of", "turns"]

LOG_PROB_EDGES = (-20.0, -10.0, -5.0, -2.0, -1.0, -0.5, -0.1)
MAX_TURNS = 32
"""Turns from this one on are one group."""


def by_decile(table: TokenTable) -> list[dict[str, Any]]:
    """mean δ and \\|δ\\| by tenth of the response."""
    place = table.index_in_sample()[table.comparable] * 10
    group = place // table.lengths[table.sample_of_delta]
    return [{"decile": i, **row} for i, row in _groups(table, group, 10)]


def by_turn(table: TokenTable) -> list[dict[str, Any]]:
    """mean δ and \\|δ\\| by turn: a contiguous run of mask 1."""
    group = turns(table)[table.comparable].clamp(max=MAX_TURNS - 1)
    return [{"turn": i, **row} for i, row in _groups(table, group, MAX_TURNS)]


def turns(table: TokenTable) -> torch.Tensor:
    """Turn of each token, counted from 0 in each sample, int64, shape ``(N,)``; meaningless where the mask is 0."""
    before = torch.zeros_like(table.mask)
    before[1:] = table.mask[:-1]
    nonempty = table.lengths > 0
    before[table.starts[nonempty]] = False
    started = (table.mask & ~before).long().cumsum(0)
    at_start = torch.zeros(len(table.lengths), dtype=torch.int64)
    first = table.starts[nonempty]
    at_start[nonempty] = started[first] - table.mask[first].long()
    return started - at_start.repeat_interleave(table.lengths) - 1


def by_log_prob(table: TokenTable) -> list[dict[str, Any]]:
    """mean δ and \\|δ\\| by log μ of the token."""
    edges = torch.tensor(LOG_PROB_EDGES)
    group = torch.bucketize(table.rollout[table.comparable], edges, right=True)
    bounds: list[float | None] = [None, *LOG_PROB_EDGES, None]
    return [
        {"from": bounds[i], "to": bounds[i + 1], **row} for i, row in _groups(table, group, len(LOG_PROB_EDGES) + 1)
    ]


def staleness_of(table: TokenTable, rollout_id: int | None) -> list[int | None]:
    """rollout_id - min(weight_versions) of each pair; None where one of them is not known."""
    if rollout_id is None:
        return [None] * len(table.pairs)
    found: list[int | None] = []
    for pair in table.pairs:
        versions = pair.rollout.get("weight_versions")
        numbers = [_version(version) for version in versions] if isinstance(versions, (list, tuple)) else []
        known = [number for number in numbers if number is not None]
        found.append(rollout_id - min(known) if known else None)
    return found


def by_staleness(table: TokenTable, rollout_id: int | None) -> list[dict[str, Any]]:
    """mean δ and \\|δ\\| by weight staleness; empty where no sample knows its weight versions."""
    staleness = staleness_of(table, rollout_id)
    values = sorted({value for value in staleness if value is not None})
    number = {value: i for i, value in enumerate(values)}
    own = torch.tensor([len(values) if value is None else number[value] for value in staleness], dtype=torch.int64)
    group = own[table.sample_of_delta] if len(own) else own
    rows = _groups(table, group, len(values) + 1)
    return [{"staleness": values[i], **row} for i, row in rows if i < len(values)]


def _version(value: Any) -> int | None:
    if isinstance(value, str):
        return int(value) if value.strip().lstrip("-").isdigit() else None
    return whole_number(value)


def _groups(table: TokenTable, group: torch.Tensor, n: int) -> list[tuple[int, dict[str, Any]]]:
    """Per group with tokens: its number, how many tokens, mean δ, mean |δ|."""
    delta = table.delta
    counts = torch.bincount(group, minlength=n).tolist()
    signed = torch.bincount(group, weights=delta, minlength=n).tolist()
    size = torch.bincount(group, weights=delta.abs(), minlength=n).tolist()
    return [
        (i, {"n_tokens": counts[i], "mean": _finite(signed[i] / counts[i]), "mean_abs": _finite(size[i] / counts[i])})
        for i in range(n)
        if counts[i]
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
