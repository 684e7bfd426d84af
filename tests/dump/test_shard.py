"""What a rank contributes, and what is refused with names and numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slime_instrument._dump.shard import contribute
from slime_instrument._errors import DumpError

from .ranks import topology

FIELDS = ("log_probs", "teacher_log_probs")


def data(**more: Any) -> dict[str, Any]:
    return {"total_lengths": [9, 8], "response_lengths": [3, 6], "tokens": [torch.zeros(9), torch.zeros(8)], **more}


def test_rank_0_contributes_everything_and_the_others_only_their_shards() -> None:
    first = contribute(data(log_probs=[torch.zeros(0), torch.zeros(2)]), topology(cp=2, cp_rank=0), FIELDS)
    second = contribute(data(log_probs=[torch.zeros(3), torch.zeros(4)]), topology(cp=2, cp_rank=1), FIELDS)
    assert set(first.manifest.common or ()) == {"total_lengths", "response_lengths", "tokens"}
    assert second.manifest.common is None
    assert (set(first.manifest.sharded), set(second.manifest.sharded)) == ({"log_probs"}, {"log_probs"})
    assert second.packer.nbytes == 7 * 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"log_probs": [torch.zeros(1), torch.zeros(2)]}, r"sample 0 holds 1 values; expected 0 \(response length 3\)"),
        ({"log_probs": [torch.zeros(0), torch.zeros(6)]}, r"sample 1 holds 6 values; expected 2 \(response length 6\)"),
        ({"log_probs": [torch.zeros(0)]}, "log_probs must hold one tensor per sample: expected 2, found 1 values"),
        ({"log_probs": [torch.zeros(0), None]}, "log_probs of local sample 1 must be a tensor, found NoneType"),
        ({"log_probs": [torch.zeros(0), torch.tensor(1.0)]}, "log_probs of local sample 1 must be a tensor"),
        ({"log_probs": torch.zeros(2, 3)}, "log_probs must hold one tensor per sample: expected 2, found Tensor"),
        ({"log_probs": [torch.zeros(0), torch.zeros(2).bfloat16()]}, "log_probs mixes .*bfloat16.*float32"),
        ({"log_probs": [torch.zeros(0, 2), torch.zeros(2)]}, "log_probs mixes"),
        ({"response_lengths": [3]}, "total_lengths has 2 samples, response_lengths 1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_is_refused_with_field_sample_and_numbers(more: Any, message: str) -> None:
    with pytest.raises(DumpError, match=message):
        contribute(data(**more), topology(cp=2), FIELDS)


def test_a_field_that_was_not_computed_is_left_out() -> None:
    manifest = contribute(data(log_probs=None, other=None), topology(), FIELDS).manifest
    assert set(manifest.common or ()) == {"total_lengths", "response_lengths", "tokens", "other"}


def test_whole_responses_on_a_context_parallel_rank_are_recognised() -> None:
    full = [torch.zeros(3), torch.zeros(6)]
    manifest = contribute(data(teacher_log_probs=full), topology(cp=2), FIELDS).manifest
    assert manifest.sharded["teacher_log_probs"].full is True
    shard = [torch.zeros(0), torch.zeros(2)]
    assert (
        contribute(data(teacher_log_probs=shard), topology(cp=2), FIELDS).manifest.sharded["teacher_log_probs"].full
        is False
    )


def test_lengths_that_fit_both_readings_are_left_to_another_rank() -> None:
    one = {"total_lengths": [9], "response_lengths": [3], "log_probs": [torch.zeros(3)]}
    assert contribute(one, topology(cp=2, cp_rank=1), FIELDS).manifest.sharded["log_probs"].full is None


def test_objects_that_had_to_be_written_as_text_are_named_in_the_provenance() -> None:
    manifest = contribute(data(metadata=[{"o": object()}, 2j]), topology(), FIELDS, provenance={"a": 1}).manifest
    assert manifest.provenance == {"a": 1, "converted": {"metadata": ["builtins.complex", "builtins.object"]}}


def test_an_empty_rank_contributes_empty_lists() -> None:
    empty: dict[str, Any] = {"total_lengths": [], "response_lengths": [], "tokens": [], "log_probs": []}
    contribution = contribute(empty, topology(cp=2), FIELDS)
    assert (contribution.manifest.common, contribution.packer.nbytes) == (empty, 0)
