"""Shards of all ranks put together again: the right values, in the right place, or a refusal that names the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_instrument._dump.payload import build_payload
from slime_instrument._errors import DumpError

from .ranks import gathered, sharded

FIELDS = ("log_probs", "teacher_log_probs", "entropy")
NAN = float("nan")


def one(total: int, *responses_full: torch.Tensor, **more: Any) -> dict[str, Any]:
    return {
        "total_lengths": [total] * len(responses_full),
        "response_lengths": [len(value) for value in responses_full],
        "log_probs": list(responses_full),
        **more,
    }


def test_case_1_a_response_wholly_on_another_rank_comes_back_exactly() -> None:
    full = torch.tensor([-0.1, -0.2, -0.3])
    data = one(9, full)
    shards = [sharded(data, 2, rank, FIELDS) for rank in (0, 1)]
    assert [len(shard["log_probs"][0]) for shard in shards] == [0, 3]
    (restored,) = gathered([shards], FIELDS)
    assert torch.equal(restored.rollout_data["log_probs"][0], full)


def test_case_2_zero_length_responses_stay_samples_of_their_own() -> None:
    data = {
        "total_lengths": [5, 4, 6],
        "response_lengths": [2, 0, 3],
        "log_probs": [torch.tensor([-1.0, -2.0]), torch.zeros(0), torch.tensor([-3.0, -4.0, -5.0])],
        "loss_masks": [torch.ones(2), torch.ones(0), torch.ones(3)],
    }
    for cp in (1, 2, 4):
        (shard,) = gathered([[sharded(data, cp, rank, FIELDS) for rank in range(cp)]], FIELDS)
        samples = build_payload([shard], rollout_id=0, writer_rank=0)["samples"]
        assert [sample["log_probs"].tolist() for sample in samples] == [[-1.0, -2.0], [], [-3.0, -4.0, -5.0]]
        assert samples[1]["log_probs"].shape == samples[1]["loss_masks"].shape == (0,)


def test_a_batch_of_nothing_but_empty_responses_is_restored() -> None:
    data = one(4, torch.zeros(0), torch.zeros(0))
    (shard,) = gathered([[sharded(data, 2, rank, FIELDS) for rank in (0, 1)]], FIELDS)
    assert [value.shape for value in shard.rollout_data["log_probs"]] == [(0,), (0,)]


def test_a_token_that_no_rank_owns_is_nan_and_not_zero() -> None:
    full = torch.tensor([1.0, 2.0, 3.0, 4.0])
    (shard,) = gathered([[sharded(one(4, full), 2, rank, FIELDS) for rank in (0, 1)]], FIELDS)
    found = shard.rollout_data["log_probs"][0]
    assert bool(found[0].isnan())
    assert found[1:].tolist() == [2.0, 3.0, 4.0]


samples = st.integers(0, 12).flatmap(
    lambda response: st.tuples(st.integers(0, 12).map(lambda prompt: prompt + response), st.just(response))
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(samples, max_size=4), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    st.sampled_from([(), (2,)]),
    st.booleans(),
)
def test_any_rollout_on_any_layout_comes_back_as_it_was(
    ranks: list[list[tuple[int, int]]], cp: int, dtype: torch.dtype, tail: tuple[int, ...], bshd: bool
) -> None:
    per_rank, position = [], 0
    for batch in ranks:
        data: dict[str, Any] = {
            "total_lengths": [total for total, _ in batch],
            "response_lengths": [response for _, response in batch],
            "log_probs": [torch.randn(response, *tail).to(dtype) for _, response in batch],
            "tokens": [torch.arange(total) for total, _ in batch],
            "partition": list(range(position, position + len(batch))),
        }
        position += len(batch)
        per_rank.append(data)
    shards = [[sharded(data, cp, rank, FIELDS) for rank in range(cp)] for data in per_rank]
    restored = gathered(shards, FIELDS)
    payload = build_payload(restored, rollout_id=3, writer_rank=0)
    wanted = [
        (data["tokens"][i], value, data["total_lengths"][i])
        for data in per_rank
        for i, value in enumerate(data["log_probs"])
    ]
    assert len(payload["samples"]) == len(wanted)
    for sample, (tokens, value, total) in zip(payload["samples"], wanted, strict=True):
        assert torch.equal(sample["tokens"], tokens)
        if "log_probs" not in sample:
            assert not any(len(batch) for batch in ranks)
            continue
        found = sample["log_probs"]
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        start = 1 if cp > 1 and total == len(value) and total else 0
        assert bool(found[:start].isnan().all())
        assert torch.equal(found[start:], value[start:])
    assert bshd in (True, False)


def test_bshd_shards_are_cut_from_the_longest_sample_of_the_micro_batch() -> None:
    from slime_instrument._dump.restore import restore
    from slime_instrument._dump.shard import contribute

    from .ranks import cut, part, topology

    full = torch.tensor([1.0, 2.0, 3.0, 4.0])
    data: dict[str, Any] = {"total_lengths": [6], "response_lengths": [4], "max_seq_lens": [16]}
    parts = [
        part(
            contribute(
                {**data, "log_probs": [cut(full, 6, 2, rank, 16)]},
                topology(2, rank),
                FIELDS,
                padded=[16],
                provenance={"qkv_format": "bshd"},
            )
        )
        for rank in (0, 1)
    ]
    assert [p.manifest.sharded["log_probs"].lengths for p in parts] == [(3,), (1,)]
    (shard,) = restore(parts, 2, FIELDS)
    assert shard.rollout_data["log_probs"][0].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_whole_responses_that_slime_leaves_unsliced_are_taken_as_they_are() -> None:
    full = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0])
    other = torch.tensor([-0.5] * 6)
    data = {**one(8, full), "teacher_log_probs": [other]}
    shards = [sharded(data, 2, rank, ("log_probs",)) for rank in (0, 1)]
    (shard,) = gathered([shards], FIELDS)
    assert torch.equal(shard.rollout_data["teacher_log_probs"][0], other)
    assert torch.equal(shard.rollout_data["log_probs"][0], full)


@pytest.mark.parametrize("sliced", [True, False])
def test_where_one_rank_alone_cannot_tell_the_other_rank_decides(sliced: bool) -> None:
    # total 9, response 3: rank 1 owns all of it, so its part looks the same either way.
    full = torch.tensor([-1.0, -2.0, -3.0])
    data = {**one(9, full), "teacher_log_probs": [full * 10]}
    fields = ("log_probs", "teacher_log_probs") if sliced else ("log_probs",)
    (shard,) = gathered([[sharded(data, 2, rank, fields) for rank in (0, 1)]], FIELDS)
    assert shard.rollout_data["teacher_log_probs"][0].tolist() == [-10.0, -20.0, -30.0]


def test_ranks_that_contradict_each_other_are_refused() -> None:
    # total 8, response 6: rank 0's part is a shard (2 values), rank 1's a whole response (6).
    full = torch.arange(6.0)
    data = one(8, full)
    whole = {**data, "log_probs": [full]}
    with pytest.raises(DumpError, match="log_probs is whole on context-parallel rank 1 and a shard on another"):
        gathered([[sharded(data, 2, 0, FIELDS), whole]], FIELDS)


def test_ranks_that_disagree_about_the_lengths_are_refused() -> None:
    ours, theirs = one(8, torch.arange(6.0)), one(20, torch.arange(6.0))
    with pytest.raises(
        DumpError, match=r"log_probs of context-parallel rank 1 holds \d values; rank 0's lengths make it 4"
    ):
        gathered([[sharded(ours, 2, 0, FIELDS), sharded(theirs, 2, 1, FIELDS)]], FIELDS)


def test_a_field_that_one_context_parallel_rank_lacks_is_refused_by_name() -> None:
    data = one(8, torch.arange(6.0))
    lacking = {key: value for key, value in data.items() if key != "log_probs"}
    with pytest.raises(DumpError, match=r"log_probs is missing on context-parallel rank\(s\) \[1\]"):
        gathered([[sharded(data, 2, 0, FIELDS), lacking]], FIELDS)


def test_a_field_of_another_dtype_on_another_rank_is_refused_by_name() -> None:
    data = one(8, torch.arange(6.0))
    other = {**data, "log_probs": [data["log_probs"][0].bfloat16()]}
    with pytest.raises(DumpError, match="log_probs has another dtype or shape"):
        gathered([[sharded(data, 2, 0, FIELDS), sharded(other, 2, 1, FIELDS)]], FIELDS)


def test_a_rank_that_contributed_nothing_is_refused_by_number() -> None:
    from slime_instrument._dump.restore import restore
    from slime_instrument._dump.shard import contribute

    from .ranks import part, topology

    data = one(8, torch.arange(6.0))
    parts = [part(contribute(sharded(data, 3, rank, FIELDS), topology(3, rank), FIELDS)) for rank in (0, 2)]
    with pytest.raises(DumpError, match=r"rank\(s\) \[1\] contributed nothing"):
        restore(parts, 3, FIELDS)


def test_uneven_and_empty_data_parallel_ranks_are_put_together_in_rank_order() -> None:
    empty: dict[str, Any] = {"total_lengths": [], "response_lengths": [], "log_probs": []}
    shards = gathered([[one(4, torch.ones(2))], [empty], [one(4, torch.zeros(1), torch.zeros(3))]], FIELDS)
    assert [(shard.data_rank, len(shard.rollout_data["response_lengths"])) for shard in shards] == [
        (0, 1),
        (1, 0),
        (2, 2),
    ]
    payload = build_payload(shards, rollout_id=0, writer_rank=0)
    assert [sample["data_parallel_rank"] for sample in payload["samples"]] == [0, 2, 2]
    assert len(payload["dp_shards"]) == 3


def test_case_14_case_15_images_and_ragged_lists_are_kept_and_never_restored() -> None:
    data = {
        **one(8, torch.arange(6.0), torch.arange(3.0)),
        "multimodal_train_inputs": [None, {"pixel_values": torch.ones(4, 1176)}],
        "rollout_top_p_token_ids": [torch.arange(5), torch.arange(0)],
        "rollout_top_p_token_offsets": [torch.tensor([0, 2, 2, 5]), torch.tensor([0])],
    }
    (shard,) = gathered([[sharded(data, 2, rank, FIELDS) for rank in (0, 1)]], FIELDS)
    first, second = build_payload([shard], rollout_id=0, writer_rank=0)["samples"]
    assert first["multimodal_train_inputs"] is None
    assert second["multimodal_train_inputs"]["pixel_values"].shape == (4, 1176)
    assert first["rollout_top_p_token_ids"].tolist() == [0, 1, 2, 3, 4]
    assert first["rollout_top_p_token_offsets"].tolist() == [0, 2, 2, 5]


def test_scalars_bools_and_integers_of_a_sample_survive() -> None:
    data = {
        **one(4, torch.ones(2), torch.zeros(1)),
        "truncated": [True, False],
        "zero_dim": [torch.tensor(3), torch.tensor(4)],
        "mask": [torch.tensor([True, False]), torch.tensor([True])],
        "text": ["a", "ü"],
    }
    (shard,) = gathered([[data]], FIELDS)
    first, second = build_payload([shard], rollout_id=0, writer_rank=0)["samples"]
    assert (first["truncated"], second["text"]) == (True, "ü")
    assert (first["zero_dim"].shape, int(first["zero_dim"])) == ((), 3)
    assert (first["mask"].dtype, first["mask"].tolist()) == (torch.bool, [True, False])
