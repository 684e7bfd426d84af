"""Tokens do not confirm who belongs to whom: they differ, are not stored, or several samples fit."""

from __future__ import annotations

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.evidence import View
from slime_instrument._analysis.swaps import swapped_by_tokens
from slime_instrument._format.values import show

CODE = "join-unconfirmed"
ORDER = 20


def find(view: View) -> Finding | None:
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
    return Finding(CODE, message[0].upper() + message[1:], tuple(sorted(samples)), evidence)
