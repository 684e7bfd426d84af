"""Old per-rank files: each by itself, then whether the files given together hold the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_instrument._format.dumps import RankData, RolloutDump, TrainDump
from slime_instrument._format.schema import CONTEXT_PARALLEL_FIELDS, GROUP_ID_FIELDS, LAYOUT_FIELDS
from slime_instrument._format.values import as_ints, as_list, length_of, show, whole_number
from slime_instrument._validate.batch import check_rank_schedule
from slime_instrument._validate.problems import Problems
from slime_instrument._validate.samples import check_ragged, check_routed_experts


def check_rank_file(rank: RankData, found: Problems) -> None:
    """Columns of one rank. Response-level values are parts of responses here, so they may only be too long."""
    data, n = rank.rollout_data, rank.n_samples
    for name in ("tokens", "response_lengths", "total_lengths", "loss_masks"):
        length = length_of(data.get(name))
        if length is None:
            found.error("missing-field", f"rollout_data has no list {name}", field=name)
        elif length != n:
            found.error("length", f"{name} has {length} entries, but the rank has {n} samples", field=name)
    for i in range(n):
        sample = rank.sample(i)
        response, total = whole_number(sample.get("response_lengths")), whole_number(sample.get("total_lengths"))
        tokens = length_of(sample.get("tokens"))
        if tokens is not None and total is not None and tokens != total:
            message = f"sample {i}: tokens has {tokens} entries, but total_lengths is {total}"
            found.error("length", message, sample=i, field="tokens")
        mask = length_of(sample.get("loss_masks"))
        if mask is not None and response is not None and mask != response:
            message = (
                f"sample {i}: loss_masks has {mask} values, but the response has {response} tokens of {total} in all"
            )
            found.error("length", message, sample=i, field="loss_masks")
        for name in CONTEXT_PARALLEL_FIELDS:
            length = length_of(sample.get(name))
            # Up to v0.2.1 the teacher's log-probs are those of the whole sample.
            limit = total if name == "teacher_log_probs" else response
            if length is not None and limit is not None and length > limit:
                message = (
                    f"sample {i}: {name} has {length} values, but the response has {response} tokens of {total} in all"
                )
                found.error("length", message, sample=i, field=name)
        check_ragged(i, sample, response, found)
        check_routed_experts(i, sample, tokens, found)
    check_rank_schedule("rollout_data", n, {name: as_list(data.get(name)) for name in LAYOUT_FIELDS}, found)


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
