"""Log-probs that are no numbers, at tokens that training counts."""

from __future__ import annotations

import torch

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.evidence import View
from slime_instrument._analysis.table import KINDS, is_filler

CODE = "non-finite"
ORDER = 30
_NAMES = {"nan": "NaN", "inf": "infinite", "filler": "a number that stands for no value"}


def find(view: View) -> Finding | None:
    table = view.table
    counts = {name: table.kind_counts[name] for name in _NAMES}
    if not any(counts.values()):
        return None
    affected = torch.zeros_like(table.comparable)
    for name in _NAMES:
        affected |= table.kind == KINDS.index(name)
    by_side = {}
    for side, values in (("rollout", table.rollout), ("train", table.train)):
        by_side[side] = int((affected & (~values.isfinite() | is_filler(values))).sum())
    shown = ", ".join(f"{count} {_NAMES[name]}" for name, count in counts.items() if count)
    message = (
        f"{sum(counts.values())} trained tokens have a log-prob that is no number: {shown} "
        f"(rollout side {by_side['rollout']}, train side {by_side['train']}). They are left out of every metric."
    )
    samples = view.positions_with(affected)
    return Finding(CODE, message, samples, {**counts, **by_side}, affected)
