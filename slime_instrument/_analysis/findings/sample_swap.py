"""Samples stand in each other's place: each one's training values match another one's rollout values."""

from __future__ import annotations

import torch

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.evidence import View
from slime_instrument._analysis.swaps import swapped_by_tokens, swapped_by_values
from slime_instrument._format.values import show

CODE = "sample-swap"
ORDER = 20


def find(view: View) -> Finding | None:
    by_tokens = swapped_by_tokens(view)
    by_values = swapped_by_values(view)
    if not by_tokens and not by_values:
        return None
    pairs = view.table.pairs
    partners = {**by_tokens, **{pairs[i].position: pairs[j].position for i, j in by_values.items()}}
    what = " and ".join(name for name, found in (("whole samples", by_tokens), ("log-probs", by_values)) if found)
    shown = show([f"{position} holds those of {partner}" for position, partner in sorted(partners.items())])
    affected = torch.zeros(len(pairs), dtype=torch.bool)
    if by_values:
        affected[torch.tensor(sorted(by_values))] = True
    message = f"{what} stand in each other's place: position {shown}. The order of samples changed between the sides."
    evidence = {"holds_values_of": {str(position): partner for position, partner in sorted(partners.items())}}
    return Finding(CODE, message[0].upper() + message[1:], tuple(sorted(partners)), evidence, view.tokens_of(affected))
