"""Exact zeros where no log-prob was written: the other side knows that the token was not certain."""

from __future__ import annotations

import torch

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.evidence import View

CODE = "zero-fill"
ORDER = 50
_SURE = -0.5  # one exact zero against a log-prob below this is no rounding
_LIKELY = -0.1
_ENOUGH = 3
_RARE = 0.01  # share of the other tokens
_MOST = 1 << 18  # tokens that this is read from


def find(view: View) -> Finding | None:
    table = view.table
    sides, tokens = {}, torch.zeros_like(view.open)
    for side, zero, other in (("train", table.train, table.rollout), ("rollout", table.rollout, table.train)):
        likely = min(_LIKELY, -10 * view.noise)
        if side == "rollout":
            likely = min(likely, _cut_off(view))
        filled = (zero == 0) & view.open & (other < likely)
        count = int(filled.count_nonzero())
        if count >= _ENOUGH or (count and bool((filled & (other < _SURE)).any())):
            sides[side] = count
            tokens |= filled
    if not sides:
        return None
    shown = " and ".join(f"{count} trained tokens of the {side} side" for side, count in sides.items())
    message = (
        f"{shown} are exactly 0.0, which claims a probability of 1, while the other side has up to "
        f"{float(torch.minimum(table.train, table.rollout)[tokens].min()):.3g}. They were filled, not computed: tokens "
        "that no context-parallel rank owns, padding, or tokens that the engine did not sample."
    )
    return Finding(CODE, message, view.positions_with(tokens), dict(sides), tokens)


def _cut_off(view: View) -> float:
    """How far below 0 training may be at a token that was alone in what truncated sampling kept.

    Such a token has log μ of exactly 0 and was computed. Its δ is the log of the mass kept, as that of the tokens
    around it is; so it lies no deeper than twice what is rare among those.
    """
    table = view.table
    certain = (table.rollout == 0) & view.open
    if not bool(certain.any()):
        return 0.0
    own = view.tokens_of(table.counts_of(certain) > 0) & view.open & ~certain
    delta = (table.train[own] - table.rollout[own])[:_MOST]
    if not len(delta):
        return 0.0
    return 2 * float(delta.sort().values[int(_RARE * len(delta))])
