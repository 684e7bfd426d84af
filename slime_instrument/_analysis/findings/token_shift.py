"""Log-probs are aligned to the neighbouring token."""

from __future__ import annotations

import torch

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.evidence import View

CODE = "token-shift"
ORDER = 45
_SUSPICIOUS = 0.1  # mean |δ| from which a sample is looked at
_REMOVED = 0.25  # the shift must leave at most this part of the difference
_ENOUGH = 8  # tokens from which one sample alone can tell


def find(view: View) -> Finding | None:
    table = view.table
    suspects = (view.mean_abs > _SUSPICIOUS) & (view.counts >= 2)
    if not bool(suspects.any()):
        return None
    shifted: dict[int, tuple[int, float, float]] = {}
    few: dict[int, tuple[int, float, float]] = {}
    n_few = 0
    for i in suspects.nonzero().flatten().tolist():
        span = table.tokens_of(i)
        rollout, train, usable = table.rollout[span], table.train[span], view.open[span]
        best = min((_aligned(rollout, train, usable, by) for by in (1, -1)), key=lambda fit: fit[2] / max(fit[1], 1e-9))
        by, before, after, n = best
        n_few += 2 <= n < _ENOUGH
        if n >= 2 and before > _SUSPICIOUS and after < _REMOVED * before:
            (shifted if n >= _ENOUGH else few)[i] = (by, before, after)
    # Two or three tokens can be near their neighbours by chance; many such samples that agree cannot.
    directions = [by for by, _, _ in (shifted or few).values()]
    common = max(set(directions), key=directions.count) if directions else 0
    agreeing = {i: fit for i, fit in few.items() if fit[0] == common}
    if shifted or (len(agreeing) >= 4 and len(agreeing) >= 0.6 * n_few):
        shifted |= agreeing
    if not shifted:
        return None
    affected = torch.zeros(len(table.lengths), dtype=torch.bool)
    affected[torch.tensor(sorted(shifted))] = True
    before = sum(fit[1] for fit in shifted.values()) / len(shifted)
    after = sum(fit[2] for fit in shifted.values()) / len(shifted)
    way = "later" if common > 0 else "earlier"
    message = (
        f"In {len(shifted)} samples the train log-prob of a token matches the rollout's of the token one {way}: "
        f"mean |difference| falls from {before:.3g} to {after:.3g} when aligned. Usually an off-by-one between logits "
        "and labels, or a prompt length that differs by one."
    )
    evidence = {"shift": common, "mean_abs": before, "mean_abs_aligned": after}
    return Finding(CODE, message, view.positions(sorted(shifted)), evidence, view.tokens_of(affected))


def _aligned(
    rollout: torch.Tensor, train: torch.Tensor, usable: torch.Tensor, by: int
) -> tuple[int, float, float, int]:
    """The shift, mean |difference| without it and with it, and over how many tokens."""
    if by > 0:
        both = usable[:-1] & usable[1:]
        ours, own, other = train[:-1][both], rollout[:-1][both], rollout[1:][both]
    else:
        both = usable[1:] & usable[:-1]
        ours, own, other = train[1:][both], rollout[1:][both], rollout[:-1][both]
    n = len(ours)
    if n == 0:
        return by, 0.0, 0.0, 0
    return by, float((ours - own).abs().mean()), float((ours - other).abs().mean()), n
