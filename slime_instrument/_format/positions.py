"""Where the samples of old train dumps stood in their rollout. Old files do not say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from slime_instrument._format.checks.values import as_ints, length_of, show
from slime_instrument._format.records import RolloutDump

__all__ = ["find_positions"]


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
