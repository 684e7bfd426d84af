"""Who belongs to whom: never by list position of an index, never where two samples fit, never against the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slime_instrument._analysis.compare import Comparison, compare
from slime_instrument._format.dumps import rollout_dump_of, train_dump_of
from tests.format import builders


def compared(dump: dict[str, Any], payload: dict[str, Any]) -> Comparison:
    return compare(rollout_dump_of(Path("rollout/7.pt"), dump), train_dump_of(Path("train/7.pt"), payload))


def unmatched(found: Comparison) -> set[tuple[str, int | None, str]]:
    return {(one["side"], one["position"], one["reason"]) for one in found["unmatched"]}


def codes(found: Comparison) -> list[str]:
    return [finding["code"] for finding in found["findings"]]


def without_positions(payload: dict[str, Any]) -> dict[str, Any]:
    for sample in payload["samples"]:
        del sample["rollout_position"]
    return payload


def test_fan_out_siblings_are_joined_by_position_whatever_their_index() -> None:  # case 4
    for indices in ([7, 7, 7, 8], [None] * 4):
        payload = builders.v2([[2, 0], [3, 1]])
        dump = builders.rollout(payload)
        for sample, source, index in zip(payload["samples"], dump["samples"], indices, strict=True):
            sample["sample_index"] = source["index"] = index
        found = compared(dump, payload)
        assert found["n_joined"] == 4
        assert found["unmatched"] == []
        assert codes(found) == []


def test_without_positions_only_unique_indices_join() -> None:
    payload = builders.v2([[2, 0], [3, 1]], indices=[7, 7, 7, 8])
    dump = builders.rollout(payload)
    found = compared(dump, without_positions(payload))
    assert found["n_joined"] == 1
    assert [pair.position for pair in found.joined.pairs] == [3]
    assert unmatched(found) == {("train", None, "ambiguous"), *(("rollout", i, "ambiguous") for i in range(3))}
    assert codes(found) == ["join-unconfirmed"]


def test_without_positions_and_indices_nothing_joins() -> None:
    payload = builders.v2()
    dump = builders.rollout(payload)
    for one in (*payload["samples"], *dump["samples"]):
        one["sample_index"] = one["index"] = None
    found = compared(dump, without_positions(payload))
    assert found["n_joined"] == 0
    assert {one["reason"] for one in found["unmatched"]} == {"ambiguous"}
    assert len(found["unmatched"]) == 8


def test_indices_that_keep_counting_are_no_positions() -> None:  # case 6
    payload = builders.v2([[0, 2], [1, 3]], indices=[512, 513, 514, 515])
    dump = builders.rollout(payload)
    payload["samples"] = [one for one in payload["samples"] if one["data_parallel_rank"] == 0]
    payload["dp_shards"] = payload["dp_shards"][:1]
    for own in (payload, without_positions(payload)):
        found = compared(dump, own)
        assert found["n_joined"] == 2
        assert unmatched(found) == {("rollout", 1, "missing-shard"), ("rollout", 3, "missing-shard")}
        assert codes(found) == ["incomplete"]
        finding = found["findings"][0]
        assert finding["samples"] == [1, 3]
        assert "2 of 4" in finding["message"]
        assert "513, 515" in finding["message"]


def test_samples_that_were_never_scheduled_are_no_finding() -> None:
    payload = builders.v2(batch=6)
    found = compared(builders.rollout(payload), payload)
    assert unmatched(found) == {("rollout", 4, "not-scheduled"), ("rollout", 5, "not-scheduled")}
    assert codes(found) == []


def test_a_batch_without_a_schedule_is_all_there_or_incomplete() -> None:
    payload = builders.v2()
    dump = builders.rollout(payload)
    for shard in payload["dp_shards"]:
        del shard["global_batch_sizes"]
    assert codes(compared(dump, payload)) == []
    payload["samples"] = payload["samples"][:3]
    assert unmatched(compared(dump, payload)) == {("rollout", 3, "missing-shard")}


def test_a_pair_whose_tokens_differ_is_not_joined() -> None:
    payload = builders.v2()
    dump = builders.rollout(payload)
    dump["samples"][1]["tokens"][-1] += 1
    found = compared(dump, payload)
    assert (found["n_joined"], found["n_tokens"]) == (3, 9)
    assert unmatched(found) == {("train", 1, "tokens-differ"), ("rollout", 1, "tokens-differ")}
    assert codes(found) == ["join-unconfirmed"]
    assert found["findings"][0]["samples"] == [1]


def test_a_pair_without_tokens_is_joined_and_said_to_be_unconfirmed() -> None:
    payload = builders.v2()
    dump = builders.rollout(payload)
    dump["samples"][2]["tokens"] = []
    found = compared(dump, payload)
    assert found["n_joined"] == 4
    assert codes(found) == ["join-unconfirmed"]
    assert found["findings"][0]["samples"] == [2]


def test_two_samples_of_one_position_are_both_refused() -> None:
    payload = builders.v2()
    dump = builders.rollout(payload)
    payload["samples"][1]["rollout_position"] = 2
    found = compared(dump, payload)
    assert found["n_joined"] == 2
    assert ("train", 2, "duplicate") in unmatched(found)
    assert ("rollout", 2, "duplicate") in unmatched(found)


def test_a_position_outside_the_rollout_is_not_in_the_rollout() -> None:
    payload = builders.v2()
    dump = builders.rollout(payload)
    payload["samples"][3]["rollout_position"] = 9
    found = compared(dump, payload)
    assert ("train", 9, "not-in-rollout") in unmatched(found)


def test_tokens_may_be_lists_or_tensors_of_any_integer_type() -> None:
    payload = builders.v2()
    dump = builders.rollout(payload)
    payload["samples"][0]["tokens"] = payload["samples"][0]["tokens"].int()
    dump["samples"][1]["tokens"] = torch.tensor(dump["samples"][1]["tokens"])
    assert compared(dump, payload)["n_joined"] == 4
