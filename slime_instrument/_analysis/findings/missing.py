"""What is not there, or is no log-prob: samples, the proof of who belongs to whom, numbers, computed values."""

from __future__ import annotations

import torch

from slime_instrument._analysis.diagnosis import Finding, View
from slime_instrument._analysis.findings.misplaced import swapped_by_tokens
from slime_instrument._analysis.table import TOKEN_KINDS, is_filler
from slime_instrument._format.values import show

__all__ = ["incomplete", "join_unconfirmed", "non_finite", "zero_fill"]


def incomplete(view: View) -> Finding | None:
    """The train side lacks samples that its own schedule counts."""
    schedule = view.join.schedule
    if schedule.complete:
        return None
    missing = sorted(schedule.missing)
    total = len(view.rollout.samples) - len(schedule.not_scheduled)
    message = f"{total - len(missing)} of {total} scheduled samples are in the train dump"
    if missing:
        indices = [view.rollout.samples[position].get("index") for position in missing]
        message += f"; missing: positions {show(missing)} (sample_index {show(indices)})"
    if schedule.n_shards is not None and schedule.shards < schedule.n_shards:
        message += f"; {schedule.shards} of {schedule.n_shards} data-parallel shards are there"
    message += ". A rank's part was not written or its file is gone."
    evidence = {
        "n_executions": schedule.n_covered,
        "n_scheduled": schedule.n_scheduled,
        "dp_shards": schedule.shards,
        "dp_shards_written": schedule.n_shards,
    }
    return Finding("incomplete", message, tuple(missing), evidence)


def join_unconfirmed(view: View) -> Finding | None:
    """Tokens do not confirm who belongs to whom: they differ, are not stored, or several samples fit."""
    swapped = swapped_by_tokens(view)  # those have a name of their own
    differing = sorted(set(view.join.differing) - set(swapped))
    unstored = sorted(pair.position for pair in view.join.pairs if not pair.confirmed)
    doubtful = [one for one in view.join.unmatched if one.reason in ("ambiguous", "duplicate")]
    parts = []
    if differing:
        parts.append(f"the tokens differ at {len(differing)} positions: {show(differing)}")
    if unstored:
        parts.append(f"one side holds no tokens at {len(unstored)} positions: {show(unstored)}")
    for reason, why in (("ambiguous", "fit several samples"), ("duplicate", "claim a position that another claims")):
        claims = [one for one in doubtful if one.reason == reason and one.side == "train"]
        if claims:
            parts.append(f"{len(claims)} train samples {why}: sample_index {show([one.index for one in claims])}")
    if not parts:
        return None
    ids = (view.rollout.rollout_id, view.train.rollout_id)
    if differing and None not in ids and ids[0] != ids[1]:
        parts.append(f"the rollout dump is of rollout {ids[0]}, the train dump of {ids[1]}")
    samples = {*differing, *unstored, *(one.position for one in doubtful if one.position is not None)}
    evidence = {
        "tokens_differ": differing,
        "no_tokens": unstored,
        "ambiguous": sum(one.reason == "ambiguous" for one in doubtful),
        "duplicate": sum(one.reason == "duplicate" for one in doubtful),
    }
    message = "; ".join(parts) + ". These are files of different rollouts, or samples were changed in between."
    return Finding("join-unconfirmed", message[0].upper() + message[1:], tuple(sorted(samples)), evidence)


# --- non-finite ---

_NAMES = {"nan": "NaN", "inf": "infinite", "filler": "a number that stands for no value"}


def non_finite(view: View) -> Finding | None:
    """Log-probs that are no numbers, at tokens that training counts."""
    table = view.table
    counts = {name: table.kind_counts[name] for name in _NAMES}
    if not any(counts.values()):
        return None
    affected = torch.zeros_like(table.comparable)
    for name in _NAMES:
        affected |= table.kind == TOKEN_KINDS.index(name)
    by_side = {}
    for side, values in (("rollout", table.rollout), ("train", table.train)):
        by_side[side] = int((affected & (~values.isfinite() | is_filler(values))).sum())
    shown = ", ".join(f"{count} {_NAMES[name]}" for name, count in counts.items() if count)
    message = (
        f"{sum(counts.values())} trained tokens have a log-prob that is no number: {shown} "
        f"(rollout side {by_side['rollout']}, train side {by_side['train']}). They are left out of every metric."
    )
    return Finding("non-finite", message, view.positions_with(affected), {**counts, **by_side}, affected)


# --- zero-fill ---

_SURE = -0.5  # one exact zero against a log-prob below this is no rounding
_LIKELY = -0.1
_ENOUGH = 3
_RARE = 0.01  # share of the other tokens
_MOST = 1 << 18  # tokens that this is read from


def zero_fill(view: View) -> Finding | None:
    """Exact zeros where no log-prob was written: the other side knows that the token was not certain."""
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
    return Finding("zero-fill", message, view.positions_with(tokens), dict(sides), tokens)


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
