"""Samples of a batch that are not in a train dump: never scheduled, or missing?

slime fills whole steps of ``global_batch_sizes`` executions in the order in which executions first appear and drops
the rest. So an absent sample is missing if the schedule counts more executions than the file has, or if it comes
before the last execution in the file. Releases without a schedule (up to v0.2.4) cut the batch before they stored
anything, so there everything absent is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime_instrument._format.dumps import Provenance
from slime_instrument._format.schema import GROUP_ID_FIELDS
from slime_instrument._format.values import as_ints, gaps, whole_number


@dataclass(frozen=True)
class Schedule:
    """What training should have seen.

    Attributes:
        missing: rollout positions that it saw but that the file lacks.
        not_scheduled: rollout positions that it never saw.
        n_covered, n_scheduled: executions in the file, and executions that the schedule counts (None: no schedule).
        shards, n_shards: data-parallel shards in the file, and how many there were (None: the file does not say).
        short: whether the schedule counts more than the file has.
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


def schedule_of(
    samples: Sequence[Mapping[str, Any]],
    shards: Sequence[Mapping[str, Any]],
    *,
    positions: Sequence[int | None],
    batch: int | None,
    rewards: int | None,
) -> Schedule:
    """Compare the samples of a v2 dump with its own schedule.

    Args:
        samples, shards: of the dump.
        positions: per sample its rollout position, or None.
        batch: samples in the rollout; None where nobody knows.
        rewards: entries of ``raw_reward``, which counts the batch where there is no schedule.
    """
    groups = [group_of(i, sample) for i, sample in enumerate(samples)]
    first: dict[object, int] = {}
    for group, position in zip(groups, positions, strict=True):
        if position is not None:
            first[group] = min(position, first.get(group, position))
    n_covered, n_scheduled = len(set(groups)), _scheduled(samples, shards, rewards)
    known = {position for position in positions if position is not None}
    end = batch if batch is not None else max(known, default=-1) + 1
    absent = frozenset(gaps(known, end))
    # A dump with as many samples as the batch lacks none, however its executions are counted.
    short = n_scheduled is not None and n_covered < n_scheduled and (batch is None or len(samples) < batch)
    if n_scheduled is None:
        missing = absent
    elif short:
        missing = absent
        if len(set(groups)) == len(groups) and n_scheduled < end:  # each execution is one sample: exact
            missing = frozenset(position for position in absent if position < n_scheduled) or absent
    else:
        last = max(first.values(), default=0)
        missing = frozenset(position for position in absent if position < last)
    n_shards = next((size for shard in shards if (size := Provenance.of(shard).data_parallel) is not None), None)
    return Schedule(missing, absent - missing, n_covered, n_scheduled, len(shards), n_shards, short)


def group_of(i: int, sample: Mapping[str, Any]) -> object:
    """Id of the execution that a sample came from; unique to the sample where the release has no such id.

    Args:
        i: place of the sample in the dump.
        sample: the sample.
    """
    for name in GROUP_ID_FIELDS:
        group = whole_number(sample.get(name))
        if group is not None:
            return group
    return ("sample", i)


def _scheduled(
    samples: Sequence[Mapping[str, Any]], shards: Sequence[Mapping[str, Any]], rewards: int | None
) -> int | None:
    for shard in shards:
        sizes = as_ints(shard.get("global_batch_sizes"))
        if sizes is not None:
            return sum(sizes)
    grouped = any(name in sample for sample in samples for name in GROUP_ID_FIELDS)
    return rewards if not grouped else None
