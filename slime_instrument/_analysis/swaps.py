"""Samples whose values or tokens are those of another sample."""

from __future__ import annotations

import torch

from slime_instrument._analysis.evidence import View
from slime_instrument._format.values import integers

__all__ = ["swapped_by_tokens", "swapped_by_values"]

_SUSPICIOUS = 0.15  # mean |δ| from which a sample's values may be another's
_LARGEST_GROUP = 128  # samples of one length that are tried against each other; the worst ones
_LARGEST_WORK = 400_000_000  # token comparisons in all


def swapped_by_tokens(view: View) -> dict[int, int]:
    """Position -> position of the rollout sample whose tokens the train sample there really holds, both ways round."""
    differing = view.join.differing
    theirs = {_content(source): position for position, (_, source) in differing.items()}
    found = {position: theirs.get(_content(sample)) for position, (sample, _) in differing.items()}
    known = {position: other for position, other in found.items() if other is not None and other != position}
    return {position: other for position, other in known.items() if position in known.values()}


def swapped_by_values(view: View) -> dict[int, int]:
    """Pair -> pair whose rollout log-probs its training log-probs match, where its own do not match at all.

    Only closed sets count: every sample in the result is somebody's true partner.
    """
    table = view.table
    suspects = ((view.mean_abs > _SUSPICIOUS) & (view.counts >= 3)).nonzero().flatten().tolist()
    groups: dict[int, list[int]] = {}
    for i in suspects:
        groups.setdefault(int(table.lengths[i]), []).append(i)
    close = max(_SUSPICIOUS, 4 * _usual(view))
    found = _by_length(view)
    work = 0
    for length, members in sorted(groups.items()):
        if len(members) < 2:
            continue
        chosen = sorted(members, key=lambda i: -float(view.mean_abs[i]))[:_LARGEST_GROUP]
        work += len(chosen) ** 2 * length
        if work > _LARGEST_WORK:
            break
        found |= _matches(view, chosen, close)
    while True:  # leave only samples that are matched themselves
        closed = {i: j for i, j in found.items() if i in found.values() and j in found}
        if closed == found:
            return found
        found = closed


def _usual(view: View) -> float:
    """Mean |δ| of the better half of the samples: what is usual where nothing is swapped."""
    known = view.mean_abs[view.counts > 0]
    if not len(known):
        return 0.0
    return float(known.sort().values[: max(1, len(known) // 2)].mean())


def _matches(view: View, members: list[int], close: float) -> dict[int, int]:
    table = view.table
    spans = [table.tokens_of(i) for i in members]
    rollout = torch.stack([table.rollout[span] for span in spans])
    train = torch.stack([table.train[span] for span in spans])
    usable = torch.stack([table.comparable[span] for span in spans])
    found = {}
    for row, i in enumerate(members):
        both = usable & usable[row]
        n = both.sum(1)
        distance = torch.where(both, (train[row] - rollout).abs(), 0.0).sum(1) / n
        distance[n < 3] = torch.inf
        own = float(distance[row])
        distance[row] = torch.inf
        best = int(distance.argmin())
        # A handful of tokens may be near by chance.
        needed = 0.3 if int(n[best]) >= 8 else 0.1
        if float(distance[best]) < min(close, needed * own):
            found[i] = members[best]
    return found


def _by_length(view: View) -> dict[int, int]:
    """Training values whose length is not that of their sample, but fits another one whose values they match."""
    table = view.table
    found = {}
    for i, values in table.misfits.items():
        best: tuple[float, int] | None = None
        for j in table.misfits:
            if j == i or int(table.lengths[j]) != len(values):
                continue
            span = table.tokens_of(j)
            usable = table.mask[span] & table.rollout[span].isfinite() & values.isfinite()
            if int(usable.sum()) < 2:
                continue
            distance = float((values - table.rollout[span]).abs()[usable].mean())
            if distance < _SUSPICIOUS and (best is None or distance < best[0]):
                best = (distance, j)
        if best is not None:
            found[i] = best[1]
    return found


def _content(sample: dict[str, object]) -> bytes:
    tokens = integers(sample.get("tokens"))
    return b"" if tokens is None else tokens.contiguous().numpy().tobytes()
