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


def find(view: View) -> Finding | None:
    table = view.table
    likely = min(_LIKELY, -10 * view.noise)
    sides, tokens = {}, torch.zeros_like(view.open)
    for side, zero, other in (("train", table.train, table.rollout), ("rollout", table.rollout, table.train)):
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
