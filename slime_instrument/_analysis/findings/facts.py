"""What the two files show exactly, whatever its cause: values that are missing or cannot be log-probs, masks and copies
that are not the rollout's. No statistics decide here, only equality."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime_instrument._analysis.diagnosis import Finding, View
from slime_instrument._analysis.table import TOKEN_KINDS, is_filler
from slime_instrument._format.values import (
    HIGHEST_LOG_PROB,
    differs_beyond_rounding,
    log_probs,
    show,
    unpredicted_first_token,
)

__all__ = ["mask_differs", "missing_log_probs", "positive_log_probs", "rollout_log_probs_differ"]


def missing_log_probs(view: View) -> Finding | None:
    """Some trained tokens lack a log-prob while others have both. (Where none has both, nothing was compared.)"""
    table = view.table
    missing = table.kind == TOKEN_KINDS.index("missing")
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


def positive_log_probs(view: View) -> Finding | None:
    """Values that no probability has."""
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


def rollout_log_probs_differ(view: View, findings: Sequence[Finding]) -> Finding | None:
    """Training's own copy of the rollout's log-probs is not what the rollout dump holds, in samples whose values are
    not known to be another sample's or another token's."""
    moved = {position for one in findings if one.code in _MOVED for position in one.samples}
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


def mask_differs(view: View, findings: Sequence[Finding]) -> Finding | None:
    """The train mask is not the rollout's, which remove_sample, or a shift that has its own name, does not explain."""
    shifted = {position for one in findings if one.code == "mask-shift" for position in one.samples}
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
