"""The table of known cuts, row by row, and that every cut can be undone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_instrument._dump.zigzag import owned, scatter_index, shard_lengths

from .ranks import cut

NONE: tuple[list[int], list[int]] = ([], [])
# (total, response, cp): front and back chunk of each rank.
TABLE: dict[tuple[int, int, int], list[tuple[list[int], list[int]]]] = {
    (8, 6, 2): [([0], [5]), ([1, 2], [3, 4])],
    (9, 3, 2): [NONE, ([0], [1, 2])],
    (10, 7, 2): [([0], []), ([1, 2, 3], [4, 5, 6])],
    (12, 1, 2): [([], [0]), NONE],
    (13, 5, 2): [NONE, ([0], [1, 2, 3, 4])],
    (17, 9, 2): [([], [8]), ([0, 1, 2], [3, 4, 5, 6, 7])],
    (17, 9, 4): [NONE, NONE, ([0, 1], [8]), ([2, 3, 4], [5, 6, 7])],
    (5, 1, 4): [NONE, NONE, NONE, ([0], [])],
    (5, 0, 2): [NONE, NONE],
    (3, 2, 8): [([0], []), ([1], []), *[NONE] * 6],
    (4, 4, 2): [([1], []), ([2], [3])],
}


@pytest.mark.parametrize(("total", "response", "cp"), TABLE)
def test_each_rank_owns_what_the_table_says(total: int, response: int, cp: int) -> None:
    found = [tuple(list(piece) for piece in owned(total, response, cp, rank)) for rank in range(cp)]
    assert found == TABLE[total, response, cp]
    lengths = [shard_lengths([total], [response], cp, rank)[0] for rank in range(cp)]
    assert lengths == [len(front) + len(back) for front, back in found]


def test_without_context_parallelism_everything_is_owned_also_without_a_prompt() -> None:
    assert owned(4, 4, 1, 0) == (range(4), range(0))
    assert owned(0, 0, 1, 0) == (range(0), range(0))


samples = st.integers(0, 60).flatmap(
    lambda response: st.tuples(st.integers(0, 40).map(lambda prompt: prompt + response), st.just(response))
)
batches = st.lists(samples, max_size=6)
cps = st.integers(1, 8)


@given(batches, cps, st.integers(0, 30) | st.none())
def test_ranks_own_disjoint_parts_and_together_all_but_a_first_token_without_a_prompt(
    batch: list[tuple[int, int]], cp: int, extra: int | None
) -> None:
    for total, response in batch:
        padded = None if extra is None else total + extra
        held = [index for rank in range(cp) for piece in owned(total, response, cp, rank, padded) for index in piece]
        expected = set(range(response)) - ({0} if cp > 1 and total == response else set())
        assert sorted(held) == sorted(expected)


@given(batches, st.integers(2, 8), st.integers(0, 30) | st.none(), st.sampled_from([(), (2,)]))
def test_scattering_the_shards_gives_back_the_responses_with_nan_exactly_where_nobody_owns(
    batch: list[tuple[int, int]], cp: int, extra: int | None, tail: tuple[int, ...]
) -> None:
    totals, responses = [total for total, _ in batch], [response for _, response in batch]
    padded = None if extra is None else [total + extra for total in totals]
    full = torch.arange(float(sum(responses))).reshape(-1, *[1] * len(tail)).expand(-1, *tail)
    pieces = full.split(responses) if responses else ()
    whole = torch.full_like(full.contiguous(), float("nan"))
    for rank in range(cp):
        shards = [
            cut(piece, total, cp, rank, None if padded is None else padded[i])
            for i, (piece, total) in enumerate(zip(pieces, totals, strict=True))
        ]
        index = scatter_index(totals, responses, cp, rank, padded)
        assert index.dtype == torch.int64
        assert index.numel() == sum(shard_lengths(totals, responses, cp, rank, padded)) == sum(map(len, shards))
        if shards:
            whole.index_copy_(0, index, torch.cat(shards))
    unowned, start = torch.zeros(len(full), dtype=torch.bool), 0
    for total, response in batch:
        if response and total == response:
            unowned[start] = True
        start += response
    assert torch.equal(whole[~unowned], full[~unowned])
    assert bool(whole[unowned].isnan().all())


def test_every_chunk_of_a_rank_is_where_slime_computes_it_from_the_padded_length() -> None:
    # bshd pads to the longest sample of the micro-batch: total 6 cut from 16 has chunks of 4.
    assert [owned(6, 4, 2, rank, 16) for rank in (0, 1)] == [(range(3), range(0)), (range(3, 4), range(0))]
