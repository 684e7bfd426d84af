"""The loss mask of the train side is that of the rollout, moved by one token."""

from __future__ import annotations

import torch

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.evidence import View

CODE = "mask-shift"
ORDER = 40


def find(view: View) -> Finding | None:
    table = view.table
    shifted: dict[int, int] = {}
    for i in _suspects(view):
        span = table.tokens_of(i)
        mask, reference = table.mask[span], _reference(view, i)
        by = next((by for by in (1, -1) if _is_shifted(mask, reference, by)), 0)
        if by:
            shifted[i] = by
    changes = sum(_changes(_reference(view, i)) for i in shifted)
    # One edge that moved may be a mask that somebody cut on purpose; two that moved alike are no accident.
    if changes < 2:
        return None
    tokens = torch.zeros_like(table.mask)
    for i in shifted:
        span = table.tokens_of(i)
        tokens[span] = table.mask[span] != _reference(view, i)
    later, earlier = (sum(by == one for by in shifted.values()) for one in (1, -1))
    way = " and ".join(
        f"{n} samples by one token to the {side}" for n, side in ((later, "right"), (earlier, "left")) if n
    )
    message = (
        f"The train loss mask is the rollout's, shifted in {way}: {int(tokens.sum())} tokens are trained that should "
        "not be, or the reverse. Usually a custom mask that counts from the first response token instead of the prompt."
    )
    evidence = {"right": later, "left": earlier, "edges": changes}
    return Finding(CODE, message, view.positions(list(shifted)), evidence, tokens)


def _suspects(view: View) -> list[int]:
    """Pairs whose mask is not the rollout's, and those where exact zeros of the rollout tell another mask."""
    table = view.table
    differs = table.mask != table.rollout_mask
    differing = table.counts_of(differs) > 0
    # Engines fill 0.0 where no token was sampled, so zeros under mask 1 beside values under mask 0 hint at a shift.
    filled = (table.rollout == 0) & table.mask
    hinted = table.counts_of(filled) > 0
    unmasked = table.counts_of((table.rollout != 0) & ~table.mask) > 0
    found = (differing & table.has_rollout_mask) | (hinted & unmasked & ~differing)
    found &= ~table.removed
    found[torch.tensor(sorted(table.misfits), dtype=torch.int64)] = False
    return [int(i) for i in found.nonzero().flatten()]


def _reference(view: View, i: int) -> torch.Tensor:
    table = view.table
    span = table.tokens_of(i)
    if bool(table.has_rollout_mask[i]) and bool((table.mask[span] != table.rollout_mask[span]).any()):
        return table.rollout_mask[span]
    return table.rollout[span] != 0


def _is_shifted(mask: torch.Tensor, reference: torch.Tensor, by: int) -> bool:
    if len(mask) < 3 or bool((mask == reference).all()):
        return False
    if by > 0:
        return bool((mask[1:] == reference[:-1]).all())
    return bool((mask[:-1] == reference[1:]).all())


def _changes(mask: torch.Tensor) -> int:
    return int((mask[1:] != mask[:-1]).sum())
