"""Puts old per-rank dumps together by plain loops, with arithmetic that shares no mistake with the lab."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load(paths: list[Path]) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=True)["rollout_data"] for path in paths]


def owned_response_places(total: int, response: int, cp: int, rank: int) -> list[int]:
    """Which response tokens a context-parallel rank holds, in the order in which it holds them."""
    chunk = total // (2 * cp)
    while chunk * 2 * cp < total:
        chunk += 1
    places = []
    for number in (rank, 2 * cp - 1 - rank):
        for position in range(number * chunk, (number + 1) * chunk):
            if total - response <= position + 1 < total:
                places.append(position + 1 - (total - response))
    return places


def whole(shards: list[dict[str, Any]], field: str) -> dict[tuple[int, ...], list[float]]:
    """``field`` of every sample, by its tokens, from the context-parallel shards of one data-parallel rank."""
    result = {}
    cp = len(shards)
    for number, tokens in enumerate(shards[0]["tokens"]):
        total, response = shards[0]["total_lengths"][number], shards[0]["response_lengths"][number]
        if cp == 1:
            result[tuple(tokens.tolist())] = shards[0][field][number].tolist()
            continue
        values: list[float | None] = [None] * response
        for rank, shard in enumerate(shards):
            assert shard["tokens"][number].tolist() == tokens.tolist()
            places = owned_response_places(total, response, cp, rank)
            for place, value in zip(places, shard[field][number].tolist(), strict=True):
                assert values[place] is None, "two ranks hold one token"
                values[place] = value
        assert None not in values, "a token that no rank holds"
        result[tuple(tokens.tolist())] = [value for value in values if value is not None]
    return result


def largest_difference(one: dict[tuple[int, ...], list[float]], other: dict[tuple[int, ...], list[float]]) -> float:
    assert one.keys() == other.keys()
    return max(abs(a - b) for tokens in one for a, b in zip(one[tokens], other[tokens], strict=True))
