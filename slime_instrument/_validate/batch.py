"""Is the batch whole: each sample that training saw there once, in order, and used once by the schedule?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from slime_instrument._format.dumps import Provenance, RankData, RolloutDump, TrainDump
from slime_instrument._format.schedule import group_of
from slime_instrument._format.schema import COLUMN_TO_SAMPLE_KEY, GROUP_ID_FIELDS, LAYOUT_FIELDS
from slime_instrument._format.values import (
    as_ints,
    as_list,
    brief,
    equal_values,
    gaps,
    length_of,
    number,
    show,
    sum_of,
    whole_number,
)
from slime_instrument._validate.problems import Problems, V2Dump


def check_coverage(dump: V2Dump, found: Problems) -> None:
    """Every sample of the batch is there: "2 of 4 covered", and which are missing."""
    total, positions, schedule = dump.batch_size, dump.positions, dump.schedule
    known = {position for position in positions if position is not None}
    covered = len(known) if known else len(dump.samples)
    for (i, _), position in zip(dump.samples, positions, strict=True):
        if position is not None and (position < 0 or (total is not None and position >= total)):
            message = f"sample {i}: rollout_position is {position}, but the batch has {total} samples"
            found.error("extra-position", message, sample=i, field="rollout_position")
    end = total if total is not None else max(known, default=-1) + 1
    missing, late = sorted(schedule.missing), sorted(schedule.not_scheduled)
    if not known:
        # Nobody can say which; how many there are still tells.
        missing, late = [], []
    if missing:
        found.error("coverage", missing_message(covered, end, missing, dump), field="rollout_position")
    elif schedule.short and dump.has_groups():
        message = (
            f"{schedule.n_covered} of {schedule.n_scheduled} covered: the schedule counts more executions than the "
            "file has"
        )
        found.error("coverage", message, field="samples")
    elif not known and total is not None and covered < total and not (dump.has_groups() and schedule.n_scheduled):
        found.error("coverage", missing_message(covered, total, [], dump), field="samples")
    if late:
        message = f"{covered} of {end} samples of the batch were scheduled; not scheduled: positions {show(late)}"
        found.warning("not-scheduled", message, field="rollout_position")


def check_schedule(dump: V2Dump, found: Problems) -> None:
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
    covered, scheduled = dump.schedule.n_covered, dump.schedule.n_scheduled
    if "global_batch_sizes" in first and dump.has_groups() and scheduled is not None and covered > scheduled:
        message = f"global_batch_sizes counts {scheduled} executions, but the samples come from {covered}"
        found.error("schedule", message, field="global_batch_sizes")


def check_rank_schedule(where: str, n_samples: int, schedule: dict[str, list[Any] | None], found: Problems) -> None:
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


def check_shard_count(dump: V2Dump, found: Problems) -> None:
    """The writer knew how many data-parallel ranks there were; that many shards are there."""
    for i, shard in dump.shards:
        size = Provenance.of(shard).data_parallel
        if size is not None and size != len(dump.shards):
            message = f"{len(dump.shards)} of {size} data-parallel shards are there, says dp_shards[{i}].provenance"
            found.error("missing-shard", message, field="dp_shards")
            return


def check_mask_sums(dump: V2Dump, found: Problems) -> None:
    """``rollout_mask_sums`` is the mask of all siblings of an execution: less than that means that one is missing."""
    sums: dict[Any, float] = {}
    stated: dict[Any, tuple[int, float]] = {}
    for i, sample in dump.samples:
        masked_in = sum_of(sample.get("loss_masks"))
        total = number(sample.get("rollout_mask_sums", sample.get("group_mask_sums")))
        if total is None or masked_in is None:
            return
        group = group_of(i, sample)
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


def _check_each_once(where: str, n_samples: int, used: list[int], found: Problems) -> None:
    outside = sorted({index for index in used if not 0 <= index < n_samples})
    twice = sorted(index for index, count in Counter(used).items() if count > 1)
    unused = gaps(set(used), n_samples)
    for indices, what in ((outside, "names"), (twice, "repeats"), (unused, "leaves out")):
        if indices:
            message = f"{where}.micro_batch_indices {what} {show(indices)}; it has {n_samples} samples"
            found.error("schedule", message, field="micro_batch_indices")


def check_order(dump: V2Dump, found: Problems) -> None:
    """Samples stand in rollout order, each position once.

    Without positions they stand by ``sample_index``, which says something only if each is there once: siblings of one
    execution share it, and it may be None.
    """
    if not dump.samples:
        return
    positions = dump.positions
    known = [position for position in positions if position is not None]
    places: dict[int, list[int]] = {}
    for (i, _), position in zip(dump.samples, positions, strict=True):
        if position is not None:
            places.setdefault(position, []).append(i)
    for position, at in sorted(places.items()):
        if len(at) > 1:
            message = f"rollout_position {position} is there {len(at)} times, in samples {show(at)}"
            found.error("duplicate", message, sample=at[1], field="rollout_position")
    if len(known) == len(positions):
        _check_ascending(dump, "rollout_position", known, found)
        return
    if known:
        at = [i for (i, _), own in zip(dump.samples, positions, strict=True) if own is None]
        message = f"{len(known)} of {len(positions)} samples have a rollout_position; samples without: {show(at)}"
        found.error("uneven-field", message, sample=at[0], field="rollout_position")
        return
    indices = [whole_number(sample.get("sample_index")) for _, sample in dump.samples]
    if any(index is None for index in indices):
        message = (
            "samples have neither rollout_position nor sample_index: their order is that of the shards, and joining "
        )
        found.warning("ambiguous", message + "them with a rollout dump is ambiguous", field="sample_index")
        return
    _check_ascending(dump, "sample_index", [index for index in indices if index is not None], found)
    repeated = [index for index, count in Counter(indices).items() if count > 1]
    if repeated:
        message = (
            f"no rollout_position, and sample_index {show(repeated)} belongs to several samples: joining is ambiguous"
        )
        found.warning("ambiguous", message, field="sample_index")


def check_shards(dump: V2Dump, found: Problems) -> None:
    """Each shard lists the samples that carry its data-parallel rank, and every rank is there once."""
    ranks = [whole_number(shard.get("data_parallel_rank")) for _, shard in dump.shards]
    for k, (i, shard) in enumerate(dump.shards):
        if ranks[k] is None:
            found.error("structure", f"dp_shards[{i}] has no data_parallel_rank", field="dp_shards")
        elif ranks[k] in ranks[:k]:
            found.error("duplicate", f"dp_shards[{i}] repeats data_parallel_rank {ranks[k]}", field="dp_shards")
        else:
            _check_shard_columns(dump, i, shard, ranks[k], found)
    present = {rank for rank in ranks if rank is not None}
    absent = gaps(present, max(present, default=-1) + 1)
    if absent:
        message = f"dp_shards lacks data_parallel_rank {show(absent)} of {max(present) + 1}"
        found.error("missing-shard", message, field="dp_shards")
    for i, sample in dump.samples:
        rank = whole_number(sample.get("data_parallel_rank"))
        if rank is not None and rank not in present:
            message = f"sample {i}: data_parallel_rank is {rank}, and no entry of dp_shards has it"
            found.error("missing-shard", message, sample=i, field="data_parallel_rank")


def _check_shard_columns(dump: V2Dump, i: int, shard: dict[str, Any], rank: int | None, found: Problems) -> None:
    members = [sample for _, sample in dump.samples if whole_number(sample.get("data_parallel_rank")) == rank]
    for column, key in COLUMN_TO_SAMPLE_KEY.items():
        values = as_list(shard.get(column))
        if values is None:
            if shard.get(column) is not None:
                found.error("type", f"dp_shards[{i}].{column} is no list", field=column)
            continue
        if len(values) != len(members):
            message = f"dp_shards[{i}].{column} has {len(values)} entries, but {len(members)} samples have its rank"
            found.error("length", message, field=column)
            continue
        own = [sample.get(key) for sample in members]
        if Counter(map(_plain, values)) != Counter(map(_plain, own)):
            message = f"dp_shards[{i}].{column} is {show(values)}, but its samples have {key} {show(own)}"
            found.error("shard-mismatch", message, field=column)


def _check_ascending(dump: V2Dump, key: str, values: list[int], found: Problems) -> None:
    for k in range(1, len(values)):
        if values[k] < values[k - 1]:
            i = dump.samples[k][0]
            message = f"sample {i}: {key} is {values[k]} after {values[k - 1]}; samples stand in rising order"
            found.error("order", message, sample=i, field=key)


def _plain(value: Any) -> Any:
    number = whole_number(value)
    return number if number is not None else repr(value)


# --- old per-rank files of one rollout ---


def check_rank_coverage(dumps: Sequence[TrainDump], rollout: RolloutDump | None, found: Problems) -> None:
    """The files of one rollout hold every sample of its batch.

    Ranks of one data-parallel group hold the same samples, so ranks with equal tokens count once.
    """
    ranks = [rank for dump in dumps for rank in dump.ranks]
    numbers = [rank.rank for rank in ranks]
    for rank in ranks:
        twins = [other for other in ranks if other.rank == rank.rank]
        if len(twins) > 1 and twins[0] is rank:
            files = show([str(other.path) for other in twins])
            found.error("duplicate", f"rank {rank.rank} is there {len(twins)} times: {files}", field="rank")
    by_content = {_fingerprint(rank): rank for rank in ranks}
    covered = sum(rank.n_samples for rank in by_content.values())
    total = _batch_total(ranks, rollout)
    if total is None or covered >= total:
        return
    indices = [
        index for rank in by_content.values() for index in as_list(rank.rollout_data.get("sample_indices")) or ()
    ]
    message = f"{covered} of {total} covered by the files of ranks {show(sorted(set(numbers)))}"
    if rollout is not None:
        missing = [sample.get("index") for sample in rollout.samples if sample.get("index") not in indices]
        if missing and None not in missing:
            message += f"; missing: sample_index {show(missing)}"
    else:
        message += "; with the rollout dump (--rollout) the missing ones can be named"
    found.error("coverage", message, field="sample_indices")


def _batch_total(ranks: Sequence[RankData], rollout: RolloutDump | None) -> int | None:
    for rank in ranks:
        data = rank.rollout_data
        n_raw = length_of(data.get("raw_reward"))
        sizes = as_ints(data.get("global_batch_sizes"))
        groups = next((as_list(data[name]) for name in GROUP_ID_FIELDS if name in data), None)
        # Where each execution is one sample, the schedule counts samples, without those that were never scheduled.
        one_each = groups is not None and len({str(group) for group in groups}) == rank.n_samples
        if sizes is not None and one_each and (n_raw is None or sum(sizes) <= n_raw):
            return sum(sizes)
        if n_raw is not None:
            return n_raw
    return len(rollout.samples) if rollout is not None else None


def _fingerprint(rank: RankData) -> Any:
    tokens = as_list(rank.rollout_data.get("tokens")) or ()
    return tuple(tuple(as_ints(sample) or ()) for sample in tokens), _key(rank.rollout_data.get("sample_indices"))


def _key(values: Any) -> Any:
    listed = as_list(values)
    return tuple(map(str, listed)) if listed is not None else None
