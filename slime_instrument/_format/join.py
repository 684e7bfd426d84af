"""Which train sample belongs to which rollout sample: by position, by index only where it is unique, else refused.

Every pair is confirmed by its tokens. A pair whose tokens differ is not joined; one whose tokens are not there is
joined and named as unconfirmed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from slime_instrument._errors import DumpFormatError, five_parts
from slime_instrument._format.dumps import RolloutDump, TrainDump
from slime_instrument._format.schedule import Schedule, schedule_of
from slime_instrument._format.values import integers, length_of, whole_number

Reason = Literal["not-scheduled", "missing-shard", "ambiguous", "duplicate", "tokens-differ", "not-in-rollout"]


@dataclass(frozen=True)
class Pair:
    """One sample seen from both sides.

    Attributes:
        position: of the sample in the rollout dump.
        index: slime's own number of the sample, or None.
        confirmed: whether both sides hold tokens, which are equal.
    """

    position: int
    index: int | None
    train: dict[str, Any]
    rollout: dict[str, Any]
    confirmed: bool


@dataclass(frozen=True)
class Unmatched:
    """A sample that was not joined.

    Attributes:
        side: which dump holds it.
        position: in the rollout, or None where it is not known.
        index: slime's own number of the sample, or None.
        reason: why.
    """

    side: Literal["rollout", "train"]
    position: int | None
    index: int | None
    reason: Reason

    def as_dict(self) -> dict[str, Any]:
        return {"side": self.side, "position": self.position, "index": self.index, "reason": self.reason}


@dataclass(frozen=True)
class Join:
    """Result of :func:`join`.

    Attributes:
        pairs: joined samples, by rollout position.
        unmatched: everything else, with the reason.
        schedule: which rollout positions training never scheduled and which are missing.
        differing: position -> (train sample, rollout sample) of the pairs whose tokens differ.
    """

    pairs: list[Pair]
    unmatched: list[Unmatched]
    schedule: Schedule
    differing: dict[int, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)


def join(rollout: RolloutDump, train: TrainDump) -> Join:
    """Join the samples of one rollout.

    Args:
        rollout: the rollout dump; not one of an evaluation.
        train: a v2 train dump.

    Raises:
        DumpFormatError: ``rollout`` is the dump of an evaluation, or ``train`` is per-rank files.
    """
    if rollout.kind == "rollout-eval":
        message = five_parts(
            str(rollout.path),
            expected="the dump of a training rollout",
            found="the dump of an evaluation",
            follows="Nothing was compared: no training belongs to it.",
            next_step="Give the file of the same number without eval_.",
        )
        raise DumpFormatError(message)
    if train.kind != "train-v2":
        raise DumpFormatError(f"{train.path}: is a per-rank file; join needs a v2 dump (slime-instrument convert).")
    located = locate(train.samples, rollout.samples)
    pairs: list[Pair] = []
    unmatched: list[Unmatched] = []
    differing: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
    reasons: dict[int, Reason] = {}
    for sample, (position, trouble) in zip(train.samples, located, strict=True):
        index = whole_number(sample.get("sample_index"))
        if position is None or trouble is not None:
            stated = whole_number(sample.get("rollout_position")) if position is None else position
            unmatched.append(Unmatched("train", stated, index, trouble or "ambiguous"))
            if position is not None and trouble == "duplicate":
                reasons[position] = "duplicate"
            continue
        source = rollout.samples[position]
        confirmed = _same_tokens(sample, source)
        if confirmed is False:
            unmatched += [Unmatched("train", position, index, "tokens-differ")]
            reasons[position] = "tokens-differ"
            differing[position] = (sample, source)
            continue
        pairs.append(Pair(position, _index_of(source, index), sample, source, bool(confirmed)))
    pairs.sort(key=lambda pair: pair.position)
    present = {pair.position for pair in pairs} | set(reasons)
    ambiguous = _ambiguous_positions(unmatched, rollout.samples, present)
    schedule = schedule_of(
        train.samples,
        train.dp_shards,
        positions=[position for position, _ in located],
        batch=len(rollout.samples),
        rewards=length_of(train.whole_batch.get("raw_reward")),
    )
    for position in range(len(rollout.samples)):
        if position in present and position not in reasons:
            continue
        reason: Reason = "missing-shard" if position in schedule.missing else "not-scheduled"
        if position in reasons:
            reason = reasons[position]
        elif position in ambiguous:
            reason = "ambiguous"
        index = _index_of(rollout.samples[position], None)
        unmatched.append(Unmatched("rollout", position, index, reason))
    return Join(pairs, unmatched, schedule.without(ambiguous), differing)


def locate(
    samples: Sequence[dict[str, Any]], sources: Sequence[dict[str, Any]]
) -> list[tuple[int | None, Reason | None]]:
    """Per train sample its rollout position (None: not known), and why it cannot be joined there (None: it can).

    By the stored position; by ``sample_index`` only where that names one sample on both sides.
    """
    positions = [whole_number(sample.get("rollout_position")) for sample in samples]
    own = Counter(position for position in positions if position is not None)
    indices = [whole_number(sample.get("sample_index")) for sample in samples]
    own_indices = Counter(index for index in indices if index is not None)
    there: dict[int, list[int]] = {}
    for position, source in enumerate(sources):
        own_index = _index_of(source, None)
        if own_index is not None:
            there.setdefault(own_index, []).append(position)
    located: list[tuple[int | None, Reason | None]] = []
    for place, index in zip(positions, indices, strict=True):
        if place is not None:
            if not 0 <= place < len(sources):
                located.append((None, "not-in-rollout"))
            else:
                located.append((place, "duplicate" if own[place] > 1 else None))
        elif index is None or own_indices[index] > 1 or len(there.get(index, ())) > 1:
            located.append((None, "ambiguous"))
        elif index not in there:
            located.append((None, "not-in-rollout"))
        elif own[there[index][0]]:
            located.append((there[index][0], "duplicate"))
        else:
            located.append((there[index][0], None))
    return located


def _ambiguous_positions(unmatched: list[Unmatched], sources: Sequence[dict[str, Any]], present: set[int]) -> set[int]:
    """Rollout samples that an ambiguous train sample may be."""
    doubtful = [one for one in unmatched if one.side == "train" and one.reason == "ambiguous"]
    if not doubtful:
        return set()
    indices = {one.index for one in doubtful}
    anything = None in indices
    return {
        position
        for position, source in enumerate(sources)
        if position not in present and (anything or _index_of(source, None) in indices)
    }


def _index_of(source: dict[str, Any], otherwise: int | None) -> int | None:
    index = whole_number(source.get("index"))
    return otherwise if index is None else index


def _same_tokens(sample: dict[str, Any], source: dict[str, Any]) -> bool | None:
    """Whether both sides hold the same tokens and response length; None where one side holds no tokens."""
    mine, theirs = whole_number(sample.get("response_lengths")), whole_number(source.get("response_length"))
    if mine is not None and theirs is not None and mine != theirs:
        return False
    ours, others = integers(sample.get("tokens")), integers(source.get("tokens"))
    if ours is None or others is None or (len(others) == 0 and len(ours) > 0):
        return None
    return bool(torch.equal(ours, others))
