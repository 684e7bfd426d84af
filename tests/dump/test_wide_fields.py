"""Sharded fields with more than one value per token, of any dtype: whole, bit for bit, without a cast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from slime_instrument._format.schema import SAMPLER_HEAD_FIELDS, SHARDED_FIELDS

from .ranks import contributions, payload_of, sharded

IDS, LOG_PROBS = SAMPLER_HEAD_FIELDS
LENGTHS = {"total_lengths": [9, 30, 5, 17], "response_lengths": [4, 29, 1, 16]}  # each with a prompt


def wide(dtype: torch.dtype, tail: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    """Random bits of ``dtype`` for each sample; no -0.0, no NaN, so that equality is of bits."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randint(-100, 100, (length, *tail), generator=generator) for length in LENGTHS["response_lengths"]]
    return [value.to(dtype) for value in values]


def rollout(**fields: list[torch.Tensor]) -> dict[str, Any]:
    count = len(LENGTHS["total_lengths"])
    tokens = [torch.arange(length) for length in LENGTHS["total_lengths"]]
    return {**LENGTHS, "tokens": tokens, "partition": list(range(count)), **fields}


def dumped(data: dict[str, Any], cp: int, names: Sequence[str], *, whole: bool = False) -> list[dict[str, Any]]:
    shards = [[data if whole else sharded(data, cp, rank, names) for rank in range(cp)]]
    samples: list[dict[str, Any]] = payload_of(shards, tuple(dict.fromkeys((*SHARDED_FIELDS, *names))))["samples"]
    return samples


@pytest.mark.parametrize("whole", [False, True], ids=["shards", "whole, as with --allgather-cp"])
@pytest.mark.parametrize("cp", [1, 2, 4])
def test_the_samplers_top_k_come_out_as_they_were(cp: int, whole: bool) -> None:
    data = rollout(**{IDS: wide(torch.int32, (5,)), LOG_PROBS: wide(torch.float32, (5,), seed=1)})
    for i, sample in enumerate(dumped(data, cp, SAMPLER_HEAD_FIELDS, whole=whole)):
        for name in SAMPLER_HEAD_FIELDS:
            assert sample[name].dtype == data[name][i].dtype
            assert sample[name].device.type == "cpu"
            assert torch.equal(sample[name], data[name][i])


@pytest.mark.parametrize("tail", [(), (1,), (3,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.bfloat16, torch.float64],
    ids=str,
)
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_any_sharded_field_that_the_user_names_comes_out_as_it_was(
    cp: int, dtype: torch.dtype, tail: tuple[int, ...]
) -> None:
    data = rollout(mine=wide(dtype, tail))
    for i, sample in enumerate(dumped(data, cp, ["mine"])):
        assert sample["mine"].dtype == dtype
        assert torch.equal(sample["mine"], data["mine"][i])


def test_samples_may_differ_in_k() -> None:
    narrow, broad = wide(torch.int32, (2,)), wide(torch.int32, (7,))
    data = rollout(**{IDS: [broad[i] if i % 2 else narrow[i] for i in range(4)]})
    for i, sample in enumerate(dumped(data, 2, [IDS])):
        assert torch.equal(sample[IDS], data[IDS][i])


def test_a_negative_zero_is_as_slimes_sum_over_ranks_leaves_it_and_extreme_integers_stay() -> None:
    extreme = [torch.full((length, 2), torch.iinfo(torch.int32).min, dtype=torch.int32) for length in (4, 29, 1, 16)]
    zeros = [torch.full((length, 2), -0.0) for length in (4, 29, 1, 16)]
    data = rollout(**{IDS: extreme, LOG_PROBS: zeros})
    for cp, signed in ((1, True), (2, False)):
        for i, sample in enumerate(dumped(data, cp, SAMPLER_HEAD_FIELDS)):
            assert torch.equal(sample[IDS], extreme[i])
            assert bool(torch.signbit(sample[LOG_PROBS]).all()) == signed


def test_they_are_two_streams_however_many_samples_there_are() -> None:
    data = rollout(**{IDS: wide(torch.int32, (5,)), LOG_PROBS: wide(torch.float32, (5,))})
    for rank, sent in enumerate(
        contributions([[sharded(data, 2, r, SAMPLER_HEAD_FIELDS) for r in (0, 1)]], SHARDED_FIELDS)
    ):
        streams = [key for key in sent.streams if key[0] in SAMPLER_HEAD_FIELDS]
        assert streams == [(IDS, torch.int32, (5,)), (LOG_PROBS, torch.float32, (5,))], rank


def test_in_a_file_they_stand_where_slime_has_them() -> None:
    values = {name: wide(torch.float32, ()) for name in ("log_probs", "rollout_log_probs")}
    data = rollout(**values, **{IDS: wide(torch.int32, (5,)), LOG_PROBS: wide(torch.float32, (5,))})
    names = [
        name for name in dumped(data, 2, [*values, *SAMPLER_HEAD_FIELDS])[0] if name in (*values, *SAMPLER_HEAD_FIELDS)
    ]
    assert names == [IDS, LOG_PROBS, "rollout_log_probs", "log_probs"]
