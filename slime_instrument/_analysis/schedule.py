"""Rollout samples that are not in a train dump: never scheduled, or missing?

slime fills whole steps of ``global_batch_sizes`` executions in the order in which executions first appear and drops
the rest. So an absent sample is missing if the schedule counts more executions than the file has, or if it stands
before the last execution in the file. Releases without a schedule (up to v0.2.4) cut the batch before they stored
anything, so there everything absent is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from slime_instrument._format.checks.values import as_ints, length_of, whole_number
from slime_instrument._format.records import TrainDump
from slime_instrument._format.schema import GROUP_ID_FIELDS, PROVENANCE

__all__ = ["Schedule", "schedule_of"]


@dataclass(frozen=True)
class Schedule:
    """What training should have seen.

    Attributes:
        missing: rollout positions that it saw but that the file lacks.
        not_scheduled: rollout positions that it never saw.
        n_covered, n_scheduled: executions in the file, and executions that the schedule counts (None: no schedule).
        short: whether the schedule counts more than the file has.
        shards, n_shards: data-parallel shards in the file, and how many there were (None: the file does not say).
    """

    missing: frozenset[int]
    not_scheduled: frozenset[int]
    n_covered: int
    n_scheduled: int | None
    shards: int
    n_shards: int | None
    short: bool

    @property
    def complete(self) -> bool:
        """Whether the file holds what its own schedule counts."""
        cut = self.n_shards is not None and self.shards < self.n_shards
        return not (self.missing or self.short or cut)

    def without(self, positions: set[int]) -> Schedule:
        """The same, with ``positions`` counted as there (they are, but nobody can say which is which)."""
        return replace(self, missing=self.missing - positions, not_scheduled=self.not_scheduled - positions)


def schedule_of(train: TrainDump, *, located: Sequence[int | None], n_rollout: int) -> Schedule:
    """Compare a v2 dump with its own schedule.

    Args:
        train: the dump.
        located: per sample of the dump its rollout position, or None.
        n_rollout: samples of the rollout dump.
    """
    groups = [_group(sample, i) for i, sample in enumerate(train.samples)]
    first: dict[object, int] = {}
    for group, position in zip(groups, located, strict=True):
        if position is not None:
            first[group] = min(position, first.get(group, position))
    n_covered = len(set(groups))
    n_scheduled = _scheduled(train)
    known = {position for position in located if position is not None}
    absent = frozenset(range(n_rollout)) - known
    last = max(first.values(), default=0)
    # A dump with as many samples as the rollout lacks none, however its executions are counted.
    short = n_scheduled is not None and n_covered < n_scheduled and len(train.samples) < n_rollout
    missing = absent if n_scheduled is None or short else frozenset(p for p in absent if p < last)
    if short and n_scheduled is not None:
        missing = _within_schedule(absent, n_scheduled, train, n_rollout)
    return Schedule(missing, absent - missing, n_covered, n_scheduled, len(train.dp_shards), _shard_count(train), short)


def _within_schedule(absent: frozenset[int], n_scheduled: int, train: TrainDump, n_rollout: int) -> frozenset[int]:
    """Of the absent positions those that the schedule reaches. Exact where each execution is one sample."""
    ids = [_group(sample, i) for i, sample in enumerate(train.samples)]
    one_each = len(set(ids)) == len(ids)
    if not one_each or n_scheduled >= n_rollout:
        return absent
    return frozenset(position for position in absent if position < n_scheduled) or absent


def _group(sample: dict[str, object], i: int) -> object:
    for name in GROUP_ID_FIELDS:
        group = whole_number(sample.get(name))
        if group is not None:
            return group
    return ("sample", i)


def _scheduled(train: TrainDump) -> int | None:
    for shard in train.dp_shards:
        sizes = as_ints(shard.get("global_batch_sizes"))
        if sizes is not None:
            return sum(sizes)
    rewards = length_of(train.whole_batch.get("raw_reward"))
    grouped = any(name in sample for sample in train.samples for name in GROUP_ID_FIELDS)
    return rewards if not grouped else None


def _shard_count(train: TrainDump) -> int | None:
    for shard in train.dp_shards:
        provenance = shard.get(PROVENANCE)
        size = whole_number(provenance.get("data_parallel")) if isinstance(provenance, dict) else None
        if size is not None:
            return size
    return None
