"""The table of known cuts, row by row; that every cut can be undone; and shards of all ranks put together again: the
right values in the right place, or a field left out with its reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_instrument._dump.contribute import contribute
from slime_instrument._dump.payload import put_together
from slime_instrument._dump.zigzag import owned, runs, shard_lengths
from slime_instrument._errors import DumpError

from .ranks import cut, gathered, payload_of, sharded, topology

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


def test_every_chunk_of_a_rank_is_where_slime_computes_it_from_the_padded_length() -> None:
    # bshd pads to the longest sample of the micro-batch: total 6 cut from 16 has chunks of 4.
    assert [owned(6, 4, 2, rank, 16) for rank in (0, 1)] == [(range(3), range(0)), (range(3, 4), range(0))]


samples = st.integers(0, 60).flatmap(
    lambda response: st.tuples(st.integers(0, 40).map(lambda prompt: prompt + response), st.just(response))
)
batches = st.lists(samples, max_size=6)


@given(batches, st.integers(1, 8), st.integers(0, 30) | st.none())
def test_ranks_own_disjoint_parts_and_together_all_but_a_first_token_without_a_prompt(
    batch: list[tuple[int, int]], cp: int, extra: int | None
) -> None:
    for total, response in batch:
        padded = None if extra is None else total + extra
        held = [index for rank in range(cp) for piece in owned(total, response, cp, rank, padded) for index in piece]
        expected = set(range(response)) - ({0} if cp > 1 and total == response else set())
        assert sorted(held) == sorted(expected)


@given(batches, st.integers(2, 8), st.integers(0, 30) | st.none(), st.sampled_from([(), (2,)]))
def test_moving_the_runs_gives_back_the_responses_and_touches_nothing_that_nobody_owns(
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
        found = runs(totals, responses, cp, rank, padded)
        assert len(found) <= 2 * len(batch)
        assert all(run.length > 0 for run in found)
        held = sum(shard_lengths(totals, responses, cp, rank, padded))
        assert sum(run.length for run in found) == held == sum(map(len, shards))
        assert [run.source for run in found] == [sum(run.length for run in found[:i]) for i in range(len(found))]
        for source, target, length in found:
            whole[target : target + length] = torch.cat(shards)[source : source + length]
    unowned, start = torch.zeros(len(full), dtype=torch.bool), 0
    for total, response in batch:
        if response and total == response:
            unowned[start] = True
        start += response
    assert torch.equal(whole[~unowned], full[~unowned])
    assert bool(whole[unowned].isnan().all())


# ---------------------------------------------------------------------------------------------------------------------
# Restoring

FIELDS = ("log_probs", "teacher_log_probs", "entropy")


def one(total: int, *responses_full: torch.Tensor, **more: Any) -> dict[str, Any]:
    return {
        "total_lengths": [total] * len(responses_full),
        "response_lengths": [len(value) for value in responses_full],
        "log_probs": list(responses_full),
        **more,
    }


def test_a_response_wholly_on_another_rank_comes_back_exactly() -> None:
    full = torch.tensor([-0.1, -0.2, -0.3])
    data = one(9, full)
    shards = [sharded(data, 2, rank, FIELDS) for rank in (0, 1)]
    assert [len(shard["log_probs"][0]) for shard in shards] == [0, 3]
    (restored,) = gathered([shards], FIELDS)
    assert torch.equal(restored.fields["log_probs"][0], full)


def test_zero_length_responses_stay_samples_of_their_own() -> None:
    data = {
        "total_lengths": [5, 4, 6],
        "response_lengths": [2, 0, 3],
        "log_probs": [torch.tensor([-1.0, -2.0]), torch.zeros(0), torch.tensor([-3.0, -4.0, -5.0])],
        "loss_masks": [torch.ones(2), torch.ones(0), torch.ones(3)],
    }
    for cp in (1, 2, 4):
        samples = payload_of([[sharded(data, cp, rank, FIELDS) for rank in range(cp)]], FIELDS)["samples"]
        assert [sample["log_probs"].tolist() for sample in samples] == [[-1.0, -2.0], [], [-3.0, -4.0, -5.0]]
        assert samples[1]["log_probs"].shape == samples[1]["loss_masks"].shape == (0,)


def test_a_batch_of_nothing_but_empty_responses_is_restored() -> None:
    data = one(4, torch.zeros(0), torch.zeros(0))
    (restored,) = gathered([[sharded(data, 2, rank, FIELDS) for rank in (0, 1)]], FIELDS)
    assert [value.shape for value in restored.fields["log_probs"]] == [(0,), (0,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32, torch.bool])
def test_a_token_that_no_rank_owns_has_no_value(dtype: torch.dtype) -> None:
    """NaN where the type has one that torch can fill in; 0.0 would be a log-prob."""
    full = torch.tensor([1.0, 1.0, 0.0, 1.0]).to(dtype)
    (restored,) = gathered([[sharded(one(4, full), 2, rank, FIELDS) for rank in (0, 1)]], FIELDS)
    found = restored.fields["log_probs"][0]
    assert found.dtype == dtype
    assert found[1:].float().tolist() == [1.0, 0.0, 1.0]
    if dtype in (torch.float32, torch.bfloat16):
        assert bool(found[0].isnan())
    else:
        assert float(found[0].float()) == 0.0


def test_negative_zero_comes_out_as_the_sum_of_zero_padded_shards_has_it() -> None:
    full = torch.tensor([-0.0, 1.0, -0.0])
    (restored,) = gathered([[sharded(one(9, full), 2, rank, FIELDS) for rank in (0, 1)]], FIELDS)
    assert (
        restored.fields["log_probs"][0].view(torch.int32).tolist()
        == torch.tensor([0.0, 1.0, 0.0]).view(torch.int32).tolist()
    )
    (alone,) = gathered([[one(9, full)]], FIELDS)
    assert alone.fields["log_probs"][0].view(torch.int32).tolist() == full.view(torch.int32).tolist()


few = st.integers(0, 12).flatmap(
    lambda response: st.tuples(st.integers(0, 12).map(lambda prompt: prompt + response), st.just(response))
)
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.float8_e5m2, torch.uint16, torch.complex64]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(few, max_size=4), min_size=1, max_size=3),
    st.integers(1, 4),
    st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2),
    st.sampled_from([(), (2,)]),
    st.integers(0, 9) | st.none(),
)
def test_any_rollout_on_any_layout_comes_back_as_it_was(
    ranks: list[list[tuple[int, int]]],
    cp: int,
    dtypes: list[torch.dtype],
    tail: tuple[int, ...],
    padding: int | None,
) -> None:
    """``padding``: in the bshd layout chunks are cut from a longer sequence than the sample's own. Two dtypes: one
    sample in another type than its neighbours."""
    for batch in ranks:
        data: dict[str, Any] = {
            "total_lengths": [total for total, _ in batch],
            "response_lengths": [response for _, response in batch],
            "log_probs": [
                torch.randint(1, 9, (response, *tail)).to(torch.float32).to(dtypes[i % len(dtypes)])
                for i, (_, response) in enumerate(batch)
            ],
            "tokens": [torch.arange(total) for total, _ in batch],
        }
        padded = None if padding is None else [total + padding for total, _ in batch]
        shards = [sharded(data, cp, rank, FIELDS, padded) for rank in range(cp)]
        payload = payload_of([shards], FIELDS, padded=padded)
        assert len(payload["samples"]) == len(batch)
        assert "left_out" not in payload["dp_shards"][0]["provenance"]
        for sample, (total, response), value in zip(payload["samples"], batch, data["log_probs"], strict=True):
            assert sample["tokens"].tolist() == list(range(total))
            found = sample["log_probs"]
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            start = 1 if cp > 1 and total == response and total else 0
            if value.is_floating_point() and value.itemsize > 1:
                assert bool(found[:start].isnan().all())
            assert (
                found[start:].contiguous().view(torch.uint8).tolist()
                == value[start:].contiguous().view(torch.uint8).tolist()
            )


def test_bshd_shards_are_cut_from_the_longest_sample_of_the_micro_batch() -> None:
    full = torch.tensor([1.0, 2.0, 3.0, 4.0])
    data: dict[str, Any] = {"total_lengths": [6], "response_lengths": [4], "max_seq_lens": [16]}
    parts = [
        contribute({**data, "log_probs": [cut(full, 6, 2, rank, 16)]}, topology(2, rank), FIELDS, padded=[16])
        for rank in (0, 1)
    ]
    assert [part.description.sharded["log_probs"][0].lengths for part in parts] == [(3,), (1,)]
    (restored,) = put_together(parts, 2, FIELDS)
    assert restored.fields["log_probs"][0].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_whole_responses_that_slime_leaves_unsliced_are_taken_as_they_are() -> None:
    full = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    other = torch.tensor([-0.5] * 6)
    data = {**one(8, full), "teacher_log_probs": [other]}
    (restored,) = gathered([[sharded(data, 2, rank, ("log_probs",)) for rank in (0, 1)]], FIELDS)
    assert torch.equal(restored.fields["teacher_log_probs"][0], other)
    assert torch.equal(restored.fields["log_probs"][0], full)


@pytest.mark.parametrize("sliced", [True, False])
def test_where_one_rank_alone_cannot_tell_the_other_rank_decides(sliced: bool) -> None:
    # total 9, response 3: rank 1 owns all of it, so its part looks the same either way.
    full = torch.tensor([-1.0, -2.0, -3.0])
    data = {**one(9, full), "teacher_log_probs": [full * 10]}
    fields = ("log_probs", "teacher_log_probs") if sliced else ("log_probs",)
    (restored,) = gathered([[sharded(data, 2, rank, fields) for rank in (0, 1)]], FIELDS)
    assert restored.fields["teacher_log_probs"][0].tolist() == [-10.0, -20.0, -30.0]


def full_of(data: dict[str, Any], **changed: Any) -> dict[str, Any]:
    return {**data, **changed}


six = torch.arange(6.0)
CONTRADICTIONS: dict[str, tuple[Any, str]] = {
    "whole on one, a shard on the other": (
        lambda data: full_of(data, log_probs=[six]),
        "is whole on context-parallel rank 1 and a shard on another",
    ),
    "missing on one": (
        lambda data: {key: value for key, value in data.items() if key != "log_probs"},
        "is missing on context-parallel rank(s) [1]",
    ),
    "another dtype on one": (
        lambda data: full_of(data, log_probs=[cut(six, 8, 2, 1).bfloat16()]),
        "has another dtype or shape on another context-parallel rank",
    ),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_a_field_on_which_the_ranks_contradict_each_other_is_left_out_with_its_reason_and_no_other(kind: str) -> None:
    change, reason = CONTRADICTIONS[kind]
    data = one(8, six, entropy=[six * 2])
    first, second = (sharded(data, 2, rank, FIELDS) for rank in (0, 1))
    payload = payload_of([[first, change(second)]], FIELDS)
    (sample,) = payload["samples"]
    assert "log_probs" not in sample
    assert torch.equal(sample["entropy"], six * 2)
    assert payload["dp_shards"][0]["provenance"]["left_out"] == {"log_probs": reason}


def test_ranks_that_have_other_samples_are_refused() -> None:
    ours, theirs = one(8, six), one(20, six)
    with pytest.raises(DumpError, match="context-parallel rank 1 has other samples than rank 0"):
        gathered([[sharded(ours, 2, 0, FIELDS), sharded(theirs, 2, 1, FIELDS)]], FIELDS)


def test_a_rank_that_contributed_nothing_is_refused_by_number() -> None:
    data = one(8, six)
    parts = [contribute(sharded(data, 3, rank, FIELDS), topology(3, rank), FIELDS) for rank in (0, 2)]
    with pytest.raises(DumpError, match=r"rank\(s\) \[1\] contributed nothing"):
        put_together(parts, 3, FIELDS)


def test_uneven_and_empty_data_parallel_ranks_are_put_together_in_rank_order() -> None:
    empty: dict[str, Any] = {"total_lengths": [], "response_lengths": [], "log_probs": []}
    parts = gathered([[one(4, torch.ones(2))], [empty], [one(4, torch.zeros(1), torch.zeros(3))]], FIELDS)
    assert [(part.head.data_rank, len(part.head.response_lengths)) for part in parts] == [(0, 1), (1, 0), (2, 2)]
    payload = payload_of([[one(4, torch.ones(2))], [empty], [one(4, torch.zeros(1), torch.zeros(3))]], FIELDS)
    assert [sample["data_parallel_rank"] for sample in payload["samples"]] == [0, 2, 2]
    assert len(payload["dp_shards"]) == 3
