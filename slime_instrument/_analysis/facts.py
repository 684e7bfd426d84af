"""What the two files show exactly, whatever its cause: values that are missing or cannot be log-probs, masks and copies
that are not the rollout's, parts of responses in another order. No statistics decide here, only equality."""

from __future__ import annotations

from collections.abc import Callable

import torch

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.evidence import View
from slime_instrument._analysis.table import KINDS, is_filler
from slime_instrument._dump.zigzag import owned
from slime_instrument._format.values import (
    HIGHEST_LOG_PROB,
    differs_beyond_rounding,
    log_probs,
    show,
    unpredicted_first_token,
    whole_number,
)


def first_facts(view: View) -> list[Finding]:
    """Facts that other findings should know: the tokens that they explain are not looked at again."""
    return _found(view, _missing, _positive, _rank_order)


def last_facts(view: View, findings: list[Finding]) -> list[Finding]:
    """Facts that another finding may have a better name for: values that are another sample's or another token's, and
    masks that are shifted."""
    moved = {position for one in findings if one.code in _MOVED for position in one.samples}
    shifted = {position for one in findings if one.code == "mask-shift" for position in one.samples}
    return _found(view, lambda found: _own_copy(found, moved), lambda found: _masks(found, shifted))


def _found(view: View, *looks: Callable[[View], Finding | None]) -> list[Finding]:
    return [finding for look in looks if (finding := look(view)) is not None]


def _missing(view: View) -> Finding | None:
    """Some trained tokens lack a log-prob while others have both. (Where none has both, nothing was compared.)"""
    table = view.table
    missing = table.kind == KINDS.index("missing")
    missing[_first_without_prompt(view)] = False
    n, trained = int(missing.sum()), int(table.mask.sum())
    if not n or not int(table.pair_sums.counts.sum()):
        return None
    sides = {side: int((missing & values.isnan()).sum()) for side, values in _sides(view)}
    shown = " and ".join(f"{count} on the {side} side" for side, count in sides.items() if count)
    message = f"{n} of {trained} trained tokens have no log-prob: {shown}. They are left out of every metric."
    if table.problems:
        message += f" {table.problems[0]}" + (f" (and {len(table.problems) - 1} more)." if table.problems[1:] else ".")
    return Finding("missing-log-probs", message, view.positions_with(missing), {"missing": n, **sides}, missing)


def _first_without_prompt(view: View) -> torch.Tensor:
    """First tokens of samples without a prompt: no logit predicts them."""
    table = view.table
    own = torch.tensor([unpredicted_first_token(pair.train) for pair in table.pairs], dtype=torch.bool)
    return table.starts[own & (table.lengths > 0)]


def _positive(view: View) -> Finding | None:
    table = view.table
    positive = {side: (values > HIGHEST_LOG_PROB) & view.open for side, values in _sides(view)}
    counts = {side: int(tokens.sum()) for side, tokens in positive.items()}
    if not any(counts.values()):
        return None
    tokens = positive["rollout"] | positive["train"]
    shown = " and ".join(f"{count} tokens of the {side} side" for side, count in counts.items() if count)
    largest = max(float(values[tokens].max()) for _, values in _sides(view))
    message = (
        f"{shown} have a log-prob above 0, up to {largest:.4g}, which no probability has. Such values are negative "
        "log-likelihoods (the sign is wrong), or stand for tokens that have none."
    )
    pairs = table.counts_of(tokens) > 0
    return Finding("positive-log-probs", message, view.positions_with(tokens), counts, view.tokens_of(pairs))


_MOVED = frozenset({"sample-swap", "token-shift", "cp-boundary", "join-unconfirmed"})


def _own_copy(view: View, moved: set[int]) -> Finding | None:
    """Training's own copy of the rollout's log-probs is not what the rollout dump holds."""
    table = view.table
    wrong = torch.zeros_like(table.mask)
    for i, pair in enumerate(table.pairs):
        span = table.tokens_of(i)
        stored = pair.train.get("rollout_log_probs")
        copy = log_probs(stored)
        if copy is None or len(copy[0]) != int(table.lengths[i]) or pair.position in moved:
            continue
        rollout = table.rollout[span]
        usable = table.mask[span] & rollout.isfinite() & ~is_filler(rollout)
        if len(usable) and unpredicted_first_token(pair.train) and copy[0][0].isnan():
            usable[0] = False  # no context-parallel rank owns it, so that no rank could hand it in
        wrong[span] = differs_beyond_rounding(copy[0], rollout, stored) & usable
    wrong &= ~table.removed.repeat_interleave(table.lengths)
    n = int(wrong.sum())
    if not n:
        return None
    positions = view.positions_with(wrong)
    message = (
        f"At {n} trained tokens of {len(positions)} samples the rollout_log_probs in the train dump are not those in "
        "the rollout dump, by more than the rounding of their type. Importance ratios and TIS weights were computed "
        "from other values than the engine gave."
    )
    return Finding("rollout-log-probs-differ", message, positions, {"tokens": n})


_CANDIDATES = (2, 4, 8)  # context-parallel sizes where the dump does not say its own
_LARGEST = 1024
_SUSPICIOUS = 0.1  # mean |δ| from which samples are looked at
_REMOVED = 0.3  # undoing the order must leave at most this part of the difference
_ENOUGH = 64  # tokens that are in another place


def _rank_order(view: View) -> Finding | None:
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
                if own_after < _REMOVED * own_before:
                    before, after, n = before + own_before, after + own_after, n + int(moved.sum())
                    pairs.append(i)
            # Few samples that fit by chance are no pattern: most of those that could show it must.
            if n >= _ENOUGH and len(pairs) >= 0.6 * len(suspects) and (best is None or after / before < best[0]):
                best = (after / before, cp, side, pairs, n, before / n, after / n)
    if best is None:
        return None
    _, cp, side, pairs, n, mean_before, mean_after = best
    chosen = torch.zeros(len(table.lengths), dtype=torch.bool)
    chosen[torch.tensor(pairs)] = True
    message = (
        f"In {len(pairs)} samples the {side} log-probs are those of the parts of {cp} context-parallel ranks, one rank "
        f"after another; each rank holds two chunks, one from each end. With the chunks in place mean |δ| of these {n} "
        f"tokens falls from {mean_before:.3g} to {mean_after:.3g}."
    )
    evidence = {
        "context_parallel": cp, "side": side, "order": "rank", "mean_abs": mean_before, "mean_abs_in_place": mean_after,
    }  # fmt: skip
    return Finding("cp-boundary", message, view.positions(pairs), evidence, view.tokens_of(chosen))


def _joined_by_rank(view: View, i: int, cp: int) -> torch.Tensor | None:
    """Response index of each value, if the parts of the ranks were put one after another; None if nothing moves."""
    pair, response = view.table.pairs[i], int(view.table.lengths[i])
    total = whole_number(pair.train.get("total_lengths"))
    if total is None or total < response:
        return None
    padded = whole_number(pair.train.get("max_seq_lens"))
    order = [k for rank in range(cp) for piece in owned(total, response, cp, rank, padded) for k in piece]
    if len(order) != response or order == sorted(order):
        return None
    return torch.tensor(order)


def _masks(view: View, shifted: set[int]) -> Finding | None:
    """The train mask is not the rollout's, which remove_sample, or a shift that has its own name, does not explain."""
    table = view.table
    # A sample whose mask is None is trained on every token; one without the field says nothing.
    told = [
        "loss_mask" in pair.rollout and pair.train.get("loss_masks") is not None and pair.position not in shifted
        for pair in table.pairs
    ]
    counts = torch.tensor(told, dtype=torch.bool) & ~table.removed
    differs = (table.mask != table.rollout_mask) & counts.repeat_interleave(table.lengths)
    n = int(differs.sum())
    if not n:
        return None
    positions = view.positions_with(differs)
    extra, lost = int((differs & table.mask).sum()), int((differs & ~table.mask).sum())
    what = [f"{extra} tokens are trained that the rollout masks" if extra else "",
            f"{lost} tokens are not trained that the rollout does not mask" if lost else ""]  # fmt: skip
    message = (
        f"The train loss mask is not the rollout's in {len(positions)} samples: {' and '.join(filter(None, what))}; "
        f"none of them has remove_sample. Positions {show(list(positions))}."
    )
    return Finding("mask-differs", message, positions, {"trained": extra, "not_trained": lost})


def _sides(view: View) -> tuple[tuple[str, torch.Tensor], tuple[str, torch.Tensor]]:
    return ("rollout", view.table.rollout), ("train", view.table.train)
