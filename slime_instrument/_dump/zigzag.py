"""Zigzag context parallelism: which response indices a rank holds, and where its values belong.

A sequence of ``total`` tokens is padded to ``2 * cp`` equal chunks; rank r owns chunks r and ``2 * cp - 1 - r``: then
causal attention is balanced. The log-prob of response index i stands at logits position ``prompt - 1 + i``, and the
last position has none. A shard holds the front chunk's response indices, then the back chunk's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """A contiguous stretch of a shard: from element ``source`` of the rank's concatenated shards to element
    ``target`` of the concatenated full responses."""

    source: int
    target: int
    length: int


def owned(total: int, response: int, cp: int, rank: int, padded: int | None = None) -> tuple[range, range]:
    """Response indices that ``rank`` holds: of its front chunk, then of its back chunk.

    ``padded``: the length that the chunks are cut from where it is not ``total`` itself (the bshd layout pads a
    micro-batch to its longest sample). ``cp`` 1 holds everything, index 0 of a sample without a prompt included.
    """
    if cp == 1:
        return range(response), range(0)
    chunk = -(-(total if padded is None else padded) // (2 * cp))
    first_position = total - response - 1  # the logits position of response index 0; -1 without a prompt

    def cut(index: int) -> range:
        start = max(index * chunk, first_position, 0)
        end = min((index + 1) * chunk, total - 1)
        return range(start - first_position, end - first_position) if start < end else range(0)

    return cut(rank), cut(2 * cp - 1 - rank)


def shard_lengths(
    totals: Sequence[int], responses: Sequence[int], cp: int, rank: int, padded: Sequence[int] | None = None
) -> list[int]:
    """How many log-probs of each sample ``rank`` holds."""
    paddings = padded if padded is not None else [None] * len(totals)
    return [
        sum(map(len, owned(total, response, cp, rank, pad)))
        for total, response, pad in zip(totals, responses, paddings, strict=True)
    ]


def runs(
    totals: Sequence[int], responses: Sequence[int], cp: int, rank: int, padded: Sequence[int] | None = None
) -> list[Run]:
    """The rank's shard as contiguous runs, in shard order; at most two per sample, none of length 0.

    One list serves every field of the batch.
    """
    found: list[Run] = []
    source = offset = 0
    paddings = padded if padded is not None else [None] * len(totals)
    for total, response, pad in zip(totals, responses, paddings, strict=True):
        for piece in owned(total, response, cp, rank, pad):
            if len(piece):
                found.append(Run(source, offset + piece.start, len(piece)))
                source += len(piece)
        offset += response
    return found
