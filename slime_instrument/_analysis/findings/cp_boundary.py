"""Outliers stand only at the edges of context-parallel chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.evidence import View
from slime_instrument._analysis.statistics import log_all_hit
from slime_instrument._dump.zigzag import owned
from slime_instrument._format.join import Pair
from slime_instrument._format.values import whole_number

CODE = "cp-boundary"
ORDER = 70
_OUTLIER = 0.2  # |δ| in nats, and at least ten times what is usual
_ENOUGH = 4
_AT_EDGES = 0.8  # share of the outliers; the largest of them are tried alone too, above heavy kernel noise
_MOST = 0.4  # share of all tokens that can be outliers
_SURE = -11.0  # log-probability of the same by chance
_MOST_SAMPLES = 2000  # samples with outliers that are looked at
_LARGEST = 1024  # context-parallel ranks that a run can have
_CANDIDATES = (2, 4, 8)  # where the dump does not say its context-parallel size


@dataclass(frozen=True)
class _Fit:
    cp: int
    side: str
    hits: int
    n: int
    chance: float
    outliers: torch.Tensor
    samples: list[int]


def find(view: View) -> Finding | None:
    table = view.table
    least = max(_OUTLIER, 10 * view.noise)
    good: list[_Fit] = []
    for limit in (least, 2 * least, 4 * least):
        above = view.size > limit
        n = int(above.count_nonzero())
        if n < _ENOUGH or n > _MOST * view.n_open:
            continue
        outliers = torch.zeros_like(table.mask)
        outliers[view.open] = above
        samples = view.pairs_with(outliers)[:_MOST_SAMPLES]
        fits = [_fit(view, outliers, samples, cp, side) for cp in _sizes(view) for side in ("last", "first", "both")]
        good += [fit for fit in fits if fit.hits >= max(_ENOUGH, _AT_EDGES * fit.n) and fit.chance < _SURE]
    if not good:
        return None
    best = min(good, key=lambda fit: fit.chance)
    where = {"last": "the last token", "first": "the first token", "both": "the first or last token"}[best.side]
    message = (
        f"{best.hits} of {best.n} outliers stand at {where} of a context-parallel chunk (size {best.cp}), where the "
        "next token belongs to another rank. Usually the last logit of a chunk was scored against a wrong label, or "
        "the parts of a response were put together wrongly."
    )
    evidence = {"context_parallel": best.cp, "edge": best.side, "outliers": best.n, "at_edges": best.hits}
    return Finding(CODE, message, view.positions(best.samples), evidence, best.outliers)


def _sizes(view: View) -> tuple[int, ...]:
    size = view.train.provenance.context_parallel
    if size is not None and size <= _LARGEST:
        return (size,) if size > 1 else ()
    return _CANDIDATES


def _fit(view: View, outliers: torch.Tensor, samples: list[int], cp: int, side: str) -> _Fit:
    """How many outliers stand at edges, and how probable that is for places chosen by chance."""
    table = view.table
    hits = total = at_edge = tokens = 0
    for i in samples:
        span = table.tokens_of(i)
        wrong, usable = outliers[span], view.open[span]
        edge = torch.zeros_like(usable)
        edge[_edges(table.pairs[i], len(usable), cp, side)] = True
        hits += int((wrong & edge).sum())
        total += int(wrong.sum())
        at_edge += int((edge & usable).sum())
        tokens += int(usable.sum())
    rate = at_edge / tokens if tokens else 1.0
    return _Fit(cp, side, hits, total, log_all_hit(hits, total, rate), outliers, samples)


def _edges(pair: Pair, response: int, cp: int, side: str) -> list[int]:
    """Response indices beside which the next or the previous one belongs to another chunk."""
    total = whole_number(pair.train.get("total_lengths"))
    if total is None or total < response:
        return []
    padded = whole_number(pair.train.get("max_seq_lens"))
    pieces = [piece for rank in range(cp) for piece in owned(total, response, cp, rank, padded) if len(piece)]
    first = [piece.start for piece in pieces if piece.start > 0]
    last = [piece.stop - 1 for piece in pieces if piece.stop < response]
    return {"first": first, "last": last, "both": first + last}[side]
