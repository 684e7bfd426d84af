"""Are all samples there that training saw, and does the schedule use each of them once?

A rollout may produce more samples than are trained: slime fills whole steps of ``global_batch_sizes`` executions, in
the order in which executions first appear, and drops the rest. So a sample that is not in the file is *missing* if the
schedule counts it, and *not scheduled* if it comes after everything that was.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from slime_instrument._format.checks.context import V2Dump
from slime_instrument._format.checks.values import (
    as_ints,
    as_list,
    brief,
    equal_values,
    gaps,
    number,
    show,
    sum_of,
    whole_number,
)
from slime_instrument._format.findings import Findings
from slime_instrument._format.schema import LAYOUT_FIELDS, PROVENANCE

__all__ = ["check_coverage", "check_mask_sums", "check_schedule", "check_shard_count", "missing_message"]


@dataclass(frozen=True)
class _Groups:
    covered: int
    scheduled: int | None


def check_coverage(dump: V2Dump, found: Findings) -> None:
    """Every sample of the batch is there: "2 of 4 covered", and which are missing."""
    total = _batch_size(dump)
    positions = dump.positions
    known = {position for position in positions if position is not None}
    covered = len(known) if known else len(dump.samples)
    groups = _groups(dump)
    for (i, _), position in zip(dump.samples, positions, strict=True):
        if position is not None and (position < 0 or (total is not None and position >= total)):
            message = f"sample {i}: rollout_position is {position}, but the batch has {total} samples"
            found.error("extra-position", message, sample=i, field="rollout_position")
    end = total if total is not None else max(known, default=-1) + 1
    absent = gaps(known, end) if known else []
    last = _first_seen_of_last_group(dump)
    missing = [position for position in absent if position < last]
    late = [position for position in absent if position >= last]
    incomplete = groups.scheduled is not None and groups.covered < groups.scheduled
    # Without a schedule (releases up to v0.2.4) the batch was cut to what is trained before anything was stored.
    if incomplete or groups.scheduled is None:
        missing, late = missing + late, []
    if missing:
        found.error("coverage", missing_message(covered, end, missing, dump), field="rollout_position")
    elif incomplete:
        message = (
            f"{groups.covered} of {groups.scheduled} covered: the schedule counts more executions than the file has"
        )
        found.error("coverage", message, field="samples")
    elif not known and total is not None and covered < total and groups.scheduled is None:
        found.error("coverage", missing_message(covered, total, [], dump), field="samples")
    if late:
        message = f"{covered} of {end} samples of the batch were scheduled; not scheduled: positions {show(late)}"
        found.warning("not-scheduled", message, field="rollout_position")


def check_schedule(dump: V2Dump, found: Findings) -> None:
    """micro_batch_indices use each local sample once; num_microbatches and global_batch_sizes agree with them."""
    first: dict[str, Any] = {}
    for i, shard in dump.shards:
        rank = whole_number(shard.get("data_parallel_rank"))
        members = sum(1 for _, sample in dump.samples if whole_number(sample.get("data_parallel_rank")) == rank)
        schedule = {name: as_list(shard.get(name)) for name in LAYOUT_FIELDS}
        check_rank_schedule(f"dp_shards[{i}]", members, schedule, found)
        for name in ("num_microbatches", "global_batch_sizes"):
            if schedule[name] is None:
                continue
            if not equal_values(first.setdefault(name, schedule[name]), schedule[name]):
                message = (
                    f"dp_shards[{i}].{name} is {brief(schedule[name])}, but another shard has {brief(first[name])}"
                )
                found.error("schedule", message, field=name)
    groups = _groups(dump)
    if groups.scheduled is not None and groups.covered > groups.scheduled:
        message = f"global_batch_sizes counts {groups.scheduled} executions, but the samples come from {groups.covered}"
        found.error("schedule", message, field="global_batch_sizes")


def check_rank_schedule(where: str, n_samples: int, schedule: dict[str, list[Any] | None], found: Findings) -> None:
    """The schedule of one rank against its number of samples."""
    micro, counts = schedule["micro_batch_indices"], schedule["num_microbatches"]
    steps = schedule["global_batch_sizes"]
    if micro is not None:
        batches = [as_ints(batch) for batch in micro]
        if any(batch is None for batch in batches):
            message = f"{where}.micro_batch_indices is no list of lists of whole numbers"
            found.error("schedule", message, field="micro_batch_indices")
        else:
            _check_each_once(where, n_samples, [index for batch in batches for index in batch or ()], found)
    numbers = as_ints(counts)
    if counts is not None and numbers is None:
        found.error("schedule", f"{where}.num_microbatches is no list of whole numbers", field="num_microbatches")
    elif numbers is not None and micro is not None and sum(numbers) != len(micro):
        message = f"{where}: num_microbatches adds up to {sum(numbers)}, but there are {len(micro)} micro-batches"
        found.error("schedule", message, field="num_microbatches")
    if counts is not None and steps is not None and len(counts) != len(steps):
        message = f"{where}: num_microbatches is for {len(counts)} steps, but global_batch_sizes for {len(steps)}"
        found.error("schedule", message, field="global_batch_sizes")


def check_shard_count(dump: V2Dump, found: Findings) -> None:
    """The writer knew how many data-parallel ranks there were; that many shards are there."""
    for i, shard in dump.shards:
        provenance = shard.get(PROVENANCE)
        size = whole_number(provenance.get("data_parallel")) if isinstance(provenance, dict) else None
        if size is not None and size != len(dump.shards):
            message = f"{len(dump.shards)} of {size} data-parallel shards are there, says dp_shards[{i}].provenance"
            found.error("missing-shard", message, field="dp_shards")
            return


def check_mask_sums(dump: V2Dump, found: Findings) -> None:
    """``rollout_mask_sums`` is the mask of all siblings of an execution: less than that means that one is missing."""
    sums: dict[Any, float] = {}
    stated: dict[Any, tuple[int, float]] = {}
    for i, sample in dump.samples:
        masked_in = sum_of(sample.get("loss_masks"))
        total = number(sample.get("rollout_mask_sums", sample.get("group_mask_sums")))
        if total is None or masked_in is None:
            return
        group = dump.group_of(i, sample)
        sums[group] = sums.get(group, 0.0) + masked_in
        stated.setdefault(group, (i, total))
    for group, (i, total) in stated.items():
        if sums[group] < total:
            message = (
                f"the samples of execution {group} have {sums[group]:g} of {total:g} masked-in tokens: one is missing"
            )
            found.error("coverage", message, sample=i, field="rollout_mask_sums")
        elif sums[group] > total:
            message = (
                f"the samples of execution {group} have {sums[group]:g} masked-in tokens, but {total:g} are stated"
            )
            found.warning("mask-sum", message, sample=i, field="rollout_mask_sums")


def missing_message(covered: int, total: int, positions: list[int], dump: V2Dump) -> str:
    """ "2 of 4 covered", with the positions, and the sample indices where a rollout dump tells them."""
    message = f"{covered} of {total} covered"
    if positions:
        message += f"; missing: positions {show(positions)}"
    rollout = dump.rollout.samples if dump.rollout is not None else []
    if positions:
        indices = [rollout[position].get("index") for position in positions if position < len(rollout)]
    else:
        own = {whole_number(sample.get("sample_index")) for _, sample in dump.samples}
        indices = [sample.get("index") for sample in rollout if sample.get("index") not in own]
    if indices and all(index is not None for index in indices):
        message += f"; sample_index {show(indices)}"
    return message


def _batch_size(dump: V2Dump) -> int | None:
    raw_reward = dump.raw_reward
    if raw_reward is not None:
        return len(raw_reward)
    return len(dump.rollout.samples) if dump.rollout is not None else None


def _groups(dump: V2Dump) -> _Groups:
    covered = len({dump.group_of(i, sample) for i, sample in dump.samples})
    for _, shard in dump.shards:
        sizes = as_ints(shard.get("global_batch_sizes"))
        if sizes is not None and dump.has_groups():
            return _Groups(covered, sum(sizes))
    return _Groups(covered, None)


def _first_seen_of_last_group(dump: V2Dump) -> int:
    """Position at which the last execution in the file first appears. Whatever stands before it was scheduled."""
    first: dict[Any, int] = {}
    for (i, sample), position in zip(dump.samples, dump.positions, strict=True):
        if position is not None:
            group = dump.group_of(i, sample)
            first[group] = min(position, first.get(group, position))
    return max(first.values(), default=0)


def _check_each_once(where: str, n_samples: int, used: list[int], found: Findings) -> None:
    outside = sorted({index for index in used if not 0 <= index < n_samples})
    twice = sorted(index for index, count in Counter(used).items() if count > 1)
    unused = gaps(set(used), n_samples)
    for indices, what in ((outside, "names"), (twice, "repeats"), (unused, "leaves out")):
        if indices:
            message = f"{where}.micro_batch_indices {what} {show(indices)}; it has {n_samples} samples"
            found.error("schedule", message, field="micro_batch_indices")
