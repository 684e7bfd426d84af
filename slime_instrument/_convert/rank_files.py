"""What old per-rank files hold: whether they can be converted at all, their columns as the restorer takes them, and
where their samples were in the rollout, which old files do not say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slime_instrument._format.containers import unusable
from slime_instrument._format.dumps import RankData, RolloutDump
from slime_instrument._format.schema import CONTEXT_PARALLEL_FIELDS, ID_COLUMNS, SHARDED_FIELDS
from slime_instrument._format.values import (
    as_ints,
    as_list,
    brief,
    holds_whole_numbers,
    is_whole_number,
    length_of,
    show,
)

_LARGEST_RANK = 1 << 14  # layouts are tried one by one; no run of an old release was anywhere near


def refuse_malformed(ranks: Sequence[RankData]) -> None:
    """Refuse files whose columns are not what slime writes: what follows takes types and counts for granted.

    Raises:
        DumpFormatError: names the file, the column, what was expected and what was found.
    """
    for rank in ranks:
        trouble = _trouble(rank)
        if trouble is not None:
            raise unusable(rank.path, trouble, next_step="slime-instrument validate says more.")


def whole_fields(rank: RankData, common: set[str]) -> dict[str, Any]:
    """The rank's columns, with values per token as tensors and the teacher's cut to the response.

    Args:
        rank: a file that :func:`refuse_malformed` lets pass.
        common: the response-level fields to keep.
    """
    data = {name: value for name, value in rank.rollout_data.items() if name not in SHARDED_FIELDS or name in common}
    for name in ("total_lengths", "response_lengths"):
        data[name] = as_ints(data[name])
    for name in ID_COLUMNS:
        if data.get(name) is not None:
            data[name] = as_list(data[name])
    for name, dtype in (("tokens", torch.int64), ("loss_masks", torch.int32)):
        values = data.get(name)
        if isinstance(values, list):
            listed = (one for one in values if isinstance(one, list))
            kind = dtype if all(holds_whole_numbers(one) for one in listed) else torch.float32
            data[name] = [torch.tensor(one, dtype=kind) if isinstance(one, list) else one for one in values]
    for name in CONTEXT_PARALLEL_FIELDS:
        values = data.get(name)
        if not isinstance(values, (list, tuple)):
            continue
        tensors = [
            value if isinstance(value, torch.Tensor) or value is None else torch.tensor(value, dtype=torch.float32)
            for value in values
        ]
        if name == "teacher_log_probs":
            # Up to v0.2.1 slime does not slice them; some servers answer for the prompt too.
            lengths = zip(tensors, data["total_lengths"], data["response_lengths"], strict=True)
            tensors = [
                one[len(one) - response :] if one is not None and len(one) == total > response else one
                for one, total, response in lengths
            ]
        data[name] = tensors
    return data


def padded_lengths(data: Mapping[str, Any]) -> list[int] | None:
    """Per sample the length that chunks were cut from in the bshd layout (v0.2.2 to v0.3.0); None in any other."""
    return as_ints(data.get("max_seq_lens"))


def _trouble(rank: RankData) -> str | None:
    if not 0 <= rank.rank < _LARGEST_RANK:
        return f"is of rank {rank.rank}, expected one of 0 to {_LARGEST_RANK - 1}"
    if rank.cp_size is not None and not 0 <= (rank.cp_rank or 0) < rank.cp_size:
        return f"says that it is of context-parallel rank {rank.cp_rank} of {rank.cp_size}"
    data = rank.rollout_data
    if rank.qkv_format not in (None, "thd", "bshd"):
        return f"has the layout {brief(rank.qkv_format)}, expected thd or bshd"
    if rank.qkv_format == "bshd" and data.get("max_seq_lens") is None:
        return "has the layout bshd without max_seq_lens, so that its chunks are not known"
    totals, responses = as_ints(data.get("total_lengths")), as_ints(data.get("response_lengths"))
    if totals is None or responses is None or len(totals) != len(responses):
        return "has no lists total_lengths and response_lengths of whole numbers, one per sample"
    bad = next((i for i, pair in enumerate(zip(responses, totals, strict=True)) if not 0 <= pair[0] <= pair[1]), None)
    if bad is not None:
        return f"states {responses[bad]} response tokens of {totals[bad]} in all for sample {bad}"
    n = len(responses)
    tokens = as_list(data.get("tokens"))
    if tokens is None or len(tokens) != n or not all(map(holds_whole_numbers, tokens)):
        return f"has no list tokens with whole numbers for each of {n} samples"
    for name in (*ID_COLUMNS, "max_seq_lens"):
        column = data.get(name)
        if column is None:
            continue
        values = as_list(column)
        if values is None or len(values) != n or not all(one is None or is_whole_number(one) for one in values):
            return f"has {brief(column)} under {name}, expected a whole number for each of {n} samples"
    for name in ("loss_masks", *CONTEXT_PARALLEL_FIELDS):
        column = data.get(name)
        if isinstance(column, (list, tuple)) and not all(one is None or _holds_numbers(one) for one in column):
            i = next(i for i, one in enumerate(column) if one is not None and not _holds_numbers(one))
            return f"has {brief(column[i])} under {name} of sample {i}, expected numbers"
        if column is not None and not isinstance(column, (list, tuple)):
            return f"has {brief(column)} under {name}, expected a list with one entry per sample"
    return None


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 1 and not value.is_complex()
    return isinstance(value, (list, tuple)) and all(type(item) in (int, float) for item in value)


def find_positions(
    shards: Sequence[dict[str, Any]], rollout: RolloutDump | None
) -> tuple[list[list[int]] | None, list[str]]:
    """Rollout position of every sample, shard by shard, and what to know about it.

    Args:
        shards: rollout_data of each data-parallel rank.
        rollout: the rollout dump; its tokens tell. Without it unique indices do, in their order.

    Returns:
        The positions, or None where they cannot be known; and warnings.
    """
    tokens = [[tuple(as_ints(one) or ()) for one in shard.get("tokens") or ()] for shard in shards]
    indices: list[Sequence[int | None]] = []
    for shard, own in zip(shards, tokens, strict=True):
        indices.append(as_ints(shard.get("sample_indices")) or [None] * len(own))
    if rollout is not None:
        return _by_tokens(tokens, indices, rollout)
    return _by_indices(shards, indices)


def _by_tokens(
    tokens: list[list[tuple[int, ...]]], indices: Sequence[Sequence[int | None]], rollout: RolloutDump
) -> tuple[list[list[int]] | None, list[str]]:
    places: dict[tuple[int, ...], list[int]] = {}
    for position, source in enumerate(rollout.samples):
        places.setdefault(tuple(as_ints(source.get("tokens")) or ()), []).append(position)
    found: list[list[int]] = []
    taken: set[int] = set()
    unknown: list[str] = []
    for own, numbers in zip(tokens, indices, strict=True):
        found.append([])
        for one, index in zip(own, numbers, strict=True):
            candidates = places.get(one, [])
            if len(candidates) > 1:
                # Equal answers to one prompt: only the index can tell them apart.
                candidates = [p for p in candidates if index is not None and rollout.samples[p].get("index") == index]
            if len(candidates) != 1 or candidates[0] in taken:
                unknown.append(f"sample_index {index} ({len(candidates)} places)")
                continue
            taken.add(candidates[0])
            found[-1].append(candidates[0])
    if unknown:
        message = (
            f"positions are not known: {len(unknown)} samples have no place of their own in {rollout.path}: "
            f"{show(unknown, 4)}"
        )
        return None, [message]
    return found, []


def _by_indices(
    shards: Sequence[dict[str, Any]], indices: Sequence[Sequence[int | None]]
) -> tuple[list[list[int]] | None, list[str]]:
    known = [index for own in indices for index in own if index is not None]
    n = sum(map(len, indices))
    twice = sorted(index for index, count in Counter(known).items() if count > 1)
    if len(known) < n or twice:
        why = f"sample_indices repeat {show(twice)}" if twice else "sample_indices are not there"
        return None, [f"positions are not known: {why}; with the rollout dump (--rollout) they can be"]
    total = next((length for shard in shards if (length := length_of(shard.get("raw_reward"))) is not None), None)
    if total != n:
        of = "an unknown number" if total is None else str(total)
        return None, [f"positions are not known: the files hold {n} of {of} samples; with --rollout they can be"]
    order = {index: position for position, index in enumerate(sorted(known))}
    warning = "positions are the order of sample_indices; with the rollout dump (--rollout) they are proven"
    return [[order[index] for index in own if index is not None] for own in indices], [warning]
