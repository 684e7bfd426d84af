"""Numbers behind the charts; the page draws them."""

from __future__ import annotations

import math
from typing import Any

import torch

from slime_instrument._analysis.corrections import PRESETS, Sweep, label
from slime_instrument._analysis.statistics import percentiles
from slime_instrument._analysis.table import TokenTable
from slime_instrument._analysis.what_if import WhatIf

__all__ = ["curve", "density", "histogram", "round_up"]

_BINS = 61  # odd: the middle bar is δ around 0
_COLUMNS, _ROWS = 40, 31
_LOWEST = -20.0  # log μ below this share the first column


def round_up(value: float) -> float:
    """The next number of the form 1, 2 or 5 times a power of ten; 1e-6 at least."""
    if not value > 1e-6:
        return 1e-6
    power: float = 10.0 ** math.floor(math.log10(value))
    return float(next((step * power for step in (1, 2, 5, 10) if value <= step * power * (1 + 1e-9)), 10 * power))


def histogram(table: TokenTable) -> dict[str, Any] | None:
    """Comparable tokens by δ. The outermost two bars hold everything beyond ``limit``, in nats."""
    delta = table.delta
    if not len(delta):
        return None
    limit = _limit(table)
    width = 2 * limit / (_BINS - 2)
    place = ((delta + limit) / width).floor().clamp(-1, _BINS - 2).long() + 1
    return {"limit": limit, "width": width, "counts": torch.bincount(place, minlength=_BINS).tolist()}


def density(table: TokenTable) -> dict[str, Any] | None:
    """Comparable tokens by log μ (columns) and δ (rows): ``cells`` of (column, row, count), empty ones left out."""
    delta = table.delta
    if not len(delta):
        return None
    limit = _limit(table)
    rollout = table.rollout[table.comparable].double()
    low = max(_LOWEST, min(math.floor(float(rollout.min())), -1))
    high = max(0.0, math.ceil(min(float(rollout.max()), 1.0)))  # a log-prob above 0 is a fault that should show
    step = (high - low) / _COLUMNS
    column = ((rollout - low) / step).floor().clamp(0, _COLUMNS - 1).long()
    width = 2 * limit / (_ROWS - 2)
    row = ((delta + limit) / width).floor().clamp(-1, _ROWS - 2).long() + 1
    counts = torch.bincount(column * _ROWS + row, minlength=_COLUMNS * _ROWS)
    filled = counts.nonzero().flatten().tolist()
    cells = [[place // _ROWS, place % _ROWS, int(counts[place])] for place in filled]
    return {
        "low": low,
        "step": step,
        "columns": _COLUMNS,
        "limit": limit,
        "width": width,
        "rows": _ROWS,
        "cells": cells,
    }


def _limit(table: TokenTable) -> float:
    (limit,) = percentiles(table.size, (0.995,))
    return round_up(limit)


def curve(sweep: Sweep, result: WhatIf) -> dict[str, Any]:
    """What each value of a sweep's parameter does to the tokens of all rollouts."""
    totals = [effect.total for effect in result.effects]
    first = sweep.policies[0]
    return {
        "policy": label(first.changed(**{sweep.parameter: PRESETS[first.name].parameters[sweep.parameter]})),
        "framework": first.framework,
        "parameter": sweep.parameter,
        "values": [effect.policy.parameters[sweep.parameter] for effect in result.effects],
        "n_tokens": totals[0].n_tokens if totals else 0,
        "touched": [
            (one.tokens_dropped + one.tokens_clipped) / one.n_tokens if one.n_tokens else None for one in totals
        ],
        "mean_weight": [one.mean_weight for one in totals],
        "ess": [one.ess for one in totals],
        "advantage_kept": [one.advantage_kept for one in totals],
        "skipped": list(result.skipped.values()),
    }
