"""The right values in the wrong place: another sample's, the neighbouring token's, another context-parallel chunk's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slime_instrument._analysis.diagnosis import Finding, View
from slime_instrument._analysis.statistics import log_all_hit
from slime_instrument._dump.zigzag import owned
from slime_instrument._format.join import Pair
from slime_instrument._format.values import integers, show, whole_number

__all__ = ["cp_boundary", "mask_shift", "rank_order", "sample_swap", "swapped_by_tokens", "token_shift"]

# --- sample-swap ---

_FOREIGN = 0.15  # mean |δ| from which a sample's values may be another's
_LARGEST_GROUP = 128  # samples of one length that are tried against each other; the worst ones
_LARGEST_WORK = 400_000_000  # token comparisons in all


def sample_swap(view: View) -> Finding | None:
    """Samples stand in each other's place: each one's training values match another one's rollout values."""
    by_tokens = swapped_by_tokens(view)
    by_values = _swapped_by_values(view)
    if not by_tokens and not by_values:
        return None
    pairs = view.table.pairs
    partners = {**by_tokens, **{pairs[i].position: pairs[j].position for i, j in by_values.items()}}
    what = " and ".join(name for name, found in (("whole samples", by_tokens), ("log-probs", by_values)) if found)
    shown = show([f"{position} holds those of {partner}" for position, partner in sorted(partners.items())])
    message = f"{what} stand in each other's place: position {shown}. The order of samples changed between the sides."
    evidence = {"holds_values_of": {str(position): partner for position, partner in sorted(partners.items())}}
    tokens = view.tokens_of(list(by_values))
    return Finding("sample-swap", message[0].upper() + message[1:], tuple(sorted(partners)), evidence, tokens)


def swapped_by_tokens(view: View) -> dict[int, int]:
    """Position -> position of the rollout sample whose tokens the train sample there really holds, both ways round."""
    differing = view.join.differing
    theirs = {_content(source): position for position, (_, source) in differing.items()}
    found = {position: theirs.get(_content(sample)) for position, (sample, _) in differing.items()}
    known = {position: other for position, other in found.items() if other is not None and other != position}
    return {position: other for position, other in known.items() if position in known.values()}


def _content(sample: dict[str, object]) -> bytes:
    tokens = integers(sample.get("tokens"))
    return b"" if tokens is None else tokens.contiguous().numpy().tobytes()


def _swapped_by_values(view: View) -> dict[int, int]:
    """Pair -> pair whose rollout log-probs its training log-probs match, where its own do not match at all.

    Only closed sets count: every sample in the result is somebody's true partner.
    """
    table = view.table
    suspects = ((view.mean_abs > _FOREIGN) & (view.counts >= 3)).nonzero().flatten().tolist()
    groups: dict[int, list[int]] = {}
    for i in suspects:
        groups.setdefault(int(table.lengths[i]), []).append(i)
    close = max(_FOREIGN, 4 * _usual(view))
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
            if distance < _FOREIGN and (best is None or distance < best[0]):
                best = (distance, j)
        if best is not None:
            found[i] = best[1]
    return found


# --- token-shift ---

_SUSPICIOUS = 0.1  # mean |δ| from which a sample is looked at
_REMOVED = 0.25  # the shift must leave at most this part of the difference
_ENOUGH_ALONE = 8  # tokens from which one sample alone can tell


def token_shift(view: View) -> Finding | None:
    """Log-probs are aligned to the neighbouring token."""
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
        n_few += 2 <= n < _ENOUGH_ALONE
        if n >= 2 and before > _SUSPICIOUS and after < _REMOVED * before:
            (shifted if n >= _ENOUGH_ALONE else few)[i] = (by, before, after)
    # Two or three tokens can be near their neighbours by chance; many such samples that agree cannot.
    directions = [by for by, _, _ in (shifted or few).values()]
    common = max(set(directions), key=directions.count) if directions else 0
    agreeing = {i: fit for i, fit in few.items() if fit[0] == common}
    if shifted or (len(agreeing) >= 4 and len(agreeing) >= 0.6 * n_few):
        shifted |= agreeing
    if not shifted:
        return None
    before = sum(fit[1] for fit in shifted.values()) / len(shifted)
    after = sum(fit[2] for fit in shifted.values()) / len(shifted)
    way = "later" if common > 0 else "earlier"
    message = (
        f"In {len(shifted)} samples the train log-prob of a token matches the rollout's of the token one {way}: "
        f"mean |difference| falls from {before:.3g} to {after:.3g} when aligned. Usually an off-by-one between logits "
        "and labels, or a prompt length that differs by one."
    )
    evidence = {"shift": common, "mean_abs": before, "mean_abs_aligned": after}
    pairs = sorted(shifted)
    return Finding("token-shift", message, view.positions(pairs), evidence, view.tokens_of(pairs))


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


# --- mask-shift ---


def mask_shift(view: View) -> Finding | None:
    """The loss mask of the train side is that of the rollout, moved by one token."""
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
    return Finding("mask-shift", message, view.positions(list(shifted)), evidence, tokens)


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


# --- cp-boundary: the parts of context-parallel ranks ---

_CANDIDATES = (2, 4, 8)  # context-parallel sizes, where the dump does not say its own
_LARGEST = 1024  # context-parallel ranks that a run can have


def _pieces(pair: Pair, response: int, cp: int) -> list[range]:
    """The response indices of all chunks, one rank after another; none where the dump does not tell the lengths."""
    total = whole_number(pair.train.get("total_lengths"))
    if total is None or total < response:
        return []
    padded = whole_number(pair.train.get("max_seq_lens"))
    return [piece for rank in range(cp) for piece in owned(total, response, cp, rank, padded)]


# --- cp-boundary: all values, in another order ---

_LEFT_IN_PLACE = 0.3  # undoing the order must leave at most this part of the difference
_ENOUGH_MOVED = 64  # tokens that are in another place, at least


def rank_order(view: View) -> Finding | None:
    """Parts of context-parallel ranks joined one after another, although each rank holds two chunks of the zigzag."""
    table = view.table
    stated = view.train.provenance.context_parallel
    sizes = _CANDIDATES if stated is None else (stated,) if 1 < stated <= _LARGEST else ()
    suspects = ((view.mean_abs > _SUSPICIOUS) & (view.counts >= 4)).nonzero().flatten().tolist()
    best: tuple[float, int, str, list[int], int, float, float] | None = None
    for cp in sizes:
        for side in ("train", "rollout"):
            before = after = 0.0
            n, pairs = 0, []
            for i in suspects:
                order = _joined_by_rank(view, i, cp)
                if order is None:
                    continue
                span = table.tokens_of(i)
                wrong, right = (table.train, table.rollout) if side == "train" else (table.rollout, table.train)
                undone = torch.empty_like(wrong[span])
                undone[order] = wrong[span]
                moved = (order != torch.arange(len(order))) & view.open[span] & undone.isfinite() & (undone <= 0)
                if not int(moved.sum()):
                    continue
                own_before = float((wrong[span] - right[span]).abs()[moved].sum())
                own_after = float((undone - right[span]).abs()[moved].sum())
                if own_after < _LEFT_IN_PLACE * own_before:
                    before, after, n = before + own_before, after + own_after, n + int(moved.sum())
                    pairs.append(i)
            # Few samples that fit by chance are no pattern: most of those that could show it must.
            if n >= _ENOUGH_MOVED and len(pairs) >= 0.6 * len(suspects) and (best is None or after / before < best[0]):
                best = (after / before, cp, side, pairs, n, before / n, after / n)
    if best is None:
        return None
    _, cp, side, pairs, n, mean_before, mean_after = best
    message = (
        f"In {len(pairs)} samples the {side} log-probs are those of the parts of {cp} context-parallel ranks, one rank "
        f"after another; each rank holds two chunks, one from each end. With the chunks in place mean |δ| of these {n} "
        f"tokens falls from {mean_before:.3g} to {mean_after:.3g}."
    )
    evidence = {
        "context_parallel": cp, "side": side, "order": "rank", "mean_abs": mean_before, "mean_abs_in_place": mean_after,
    }  # fmt: skip
    return Finding("cp-boundary", message, view.positions(pairs), evidence, view.tokens_of(pairs))


def _joined_by_rank(view: View, i: int, cp: int) -> torch.Tensor | None:
    """Response index of each value, if the parts of the ranks were put one after another; None if nothing moves."""
    response = int(view.table.lengths[i])
    order = [k for piece in _pieces(view.table.pairs[i], response, cp) for k in piece]
    if len(order) != response or order == sorted(order):
        return None
    return torch.tensor(order)


# --- cp-boundary: the edges of chunks ---

_OUTLIER = 0.2  # |δ| in nats, and at least ten times what is usual
_ENOUGH = 4
_AT_EDGES = 0.8  # share of the outliers; the largest of them are tried alone too, above heavy kernel noise
_MOST = 0.4  # share of all tokens that can be outliers
_SURE = -11.0  # log-probability of the same by chance
_MOST_SAMPLES = 2000  # samples with outliers that are looked at


@dataclass(frozen=True)
class _Edges:
    cp: int
    side: str
    hits: int
    n: int
    chance: float
    outliers: torch.Tensor
    samples: list[int]


def cp_boundary(view: View) -> Finding | None:
    """Outliers stand only at the edges of context-parallel chunks."""
    table = view.table
    least = max(_OUTLIER, 10 * view.noise)
    good: list[_Edges] = []
    for limit in (least, 2 * least, 4 * least):
        above = view.size > limit
        n = int(above.count_nonzero())
        if n < _ENOUGH or n > _MOST * view.n_open:
            continue
        outliers = torch.zeros_like(table.mask)
        outliers[view.open] = above
        samples = view.pairs_with(outliers)[:_MOST_SAMPLES]
        fits = [
            _at_edges(view, outliers, samples, cp, side) for cp in _sizes(view) for side in ("last", "first", "both")
        ]
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
    return Finding("cp-boundary", message, view.positions(best.samples), evidence, best.outliers)


def _sizes(view: View) -> tuple[int, ...]:
    size = view.train.provenance.context_parallel
    if size is not None and size <= _LARGEST:
        return (size,) if size > 1 else ()
    return _CANDIDATES


def _at_edges(view: View, outliers: torch.Tensor, samples: list[int], cp: int, side: str) -> _Edges:
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
    return _Edges(cp, side, hits, total, log_all_hit(hits, total, rate), outliers, samples)


def _edges(pair: Pair, response: int, cp: int, side: str) -> list[int]:
    """Response indices beside which the next or the previous one belongs to another chunk."""
    pieces = [piece for piece in _pieces(pair, response, cp) if len(piece)]
    first = [piece.start for piece in pieces if piece.start > 0]
    last = [piece.stop - 1 for piece in pieces if piece.stop < response]
    return {"first": first, "last": last, "both": first + last}[side]
