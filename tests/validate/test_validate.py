"""Each kind of fault is found, named with its numbers, and found alone; right dumps pass."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._errors import DumpFormatError
from slime_instrument._format.dumps import rollout_dump_of
from slime_instrument._validate import validate_files, validate_v2
from slime_instrument._validate.problems import Problem, Problems
from tests.format import builders

TRAIN = Path("7.pt")


def check(payload: dict[str, Any], source: dict[str, Any] | None = None) -> Problems:
    dump = rollout_dump_of(Path("rollout/7.pt"), source) if source is not None else None
    return validate_v2(TRAIN, payload, dump)


def only_error(found: Problems) -> Problem:
    assert [(e.code, e.message) for e in found.errors[1:]] == []
    assert found.warnings == []
    return found.errors[0]


@pytest.mark.parametrize("provenance", [False, True], ids=["native", "ours"])
def test_a_right_dump_has_no_finding(provenance: bool) -> None:
    payload = builders.v2(provenance=provenance)
    found = check(payload, builders.rollout(payload))
    assert (found.errors, found.warnings) == ([], [])


# Case 2


def test_a_zero_length_response_is_valid() -> None:
    payload = builders.v2([[0, 1, 2]], responses=[2, 0, 3])
    assert payload["samples"][1]["log_probs"].shape == (0,)
    found = check(payload, builders.rollout(payload))
    assert (found.errors, found.warnings) == ([], [])


# Case 4


def test_fan_out_siblings_with_positions_are_valid_whatever_their_index() -> None:
    payload = builders.v2([[2, 0], [3, 1]], indices=[7, 7, 7, 8])
    for one, group in zip(payload["samples"], [70, 70, 70, 80], strict=True):
        one["rollout_ids"] = group
        one["rollout_mask_sums"] = torch.tensor(9.0 if group == 70 else 3.0)
    for shard in payload["dp_shards"]:
        shard["global_batch_sizes"] = [2]
    assert [one["rollout_position"] for one in payload["samples"]] == [0, 1, 2, 3]
    found = check(payload, builders.rollout(payload))
    assert (found.errors, found.warnings) == ([], [])


def test_a_sibling_that_is_missing_shows_in_the_mask_sums() -> None:
    payload = builders.v2([[0, 1]], batch=2, indices=[7, 7])
    for one in payload["samples"]:
        one["rollout_mask_sums"] = torch.tensor(9.0)
    payload["dp_shards"][0]["global_batch_sizes"] = [1]
    error = only_error(check(payload))
    assert error.code == "coverage"
    assert "execution 7 have 6 of 9 masked-in tokens" in error.message


@pytest.mark.parametrize("indices", [[7, 7, 7, 8], [None] * 4], ids=["duplicates", "none"])
def test_without_positions_duplicate_or_absent_indices_are_ambiguous(indices: list[int | None]) -> None:
    payload = builders.v2()
    for one, index in zip(payload["samples"], indices, strict=True):
        del one["rollout_position"]
        one["sample_index"] = index
    for shard in payload["dp_shards"]:
        shard["partition"] = None
        rank = shard["data_parallel_rank"]
        shard["sample_indices"] = [s["sample_index"] for s in payload["samples"] if s["data_parallel_rank"] == rank]
    found = check(payload)
    assert found.errors == []
    assert [warning.code for warning in found.warnings] == ["ambiguous"]


def test_a_duplicate_position_is_an_error() -> None:
    payload = builders.v2()
    payload["samples"][1]["rollout_position"] = 0
    payload["dp_shards"][1]["partition"] = [0, 3]
    codes = {error.code: error for error in check(payload).errors}
    assert codes["duplicate"].message == "rollout_position 0 is there 2 times, in samples 0, 1"
    assert "3 of 4 covered; missing: positions 1" in codes["coverage"].message


# Case 5


@pytest.mark.parametrize(("rows", "valid"), [(5, True), (7, False)])
def test_routed_experts_have_one_row_less_than_tokens(rows: int, valid: bool) -> None:
    payload = builders.v2()
    for one in payload["samples"]:
        one["rollout_routed_experts"] = torch.zeros(5, 4, 2, dtype=torch.int16)
    payload["samples"][2]["rollout_routed_experts"] = torch.zeros(rows, 4, 2, dtype=torch.int16)
    found = check(payload)
    if valid:
        assert found.errors == []
        return
    error = only_error(found)
    assert (error.code, error.sample, error.field) == ("routed-experts", 2, "rollout_routed_experts")
    assert "7 rows" in error.message
    assert "6 tokens - 1 = 5" in error.message


# Case 6


def test_a_missing_shard_file_is_two_of_four_covered_with_the_missing_ones_named(tmp_path: Path) -> None:
    payload = builders.v2(indices=[512, 513, 514, 515])
    source = builders.save(builders.rollout(payload), tmp_path / "rollout" / "7.pt")
    here = builders.save(builders.rank_file(0, [0, 2], first_index=512), tmp_path / "7_0.pt")
    gone = builders.save(builders.rank_file(1, [1, 3], first_index=512), tmp_path / "7_1.pt")
    assert validate_files([here, gone], rollout=source).errors == []
    (error,) = validate_files([here], rollout=source).errors
    assert error.code == "coverage"
    assert error.message == "2 of 4 covered by the files of ranks 0; missing: sample_index 513, 515"


def test_a_v2_file_without_one_shard_names_positions_and_indices() -> None:
    whole = builders.v2(indices=[512, 513, 514, 515])
    source = builders.rollout(whole)
    whole["samples"] = [one for one in whole["samples"] if one["data_parallel_rank"] == 0]
    del whole["dp_shards"][1]
    error = only_error(check(whole, source))
    assert (error.code, error.field) == ("coverage", "rollout_position")
    assert error.message == "2 of 4 covered; missing: positions 1, 3; sample_index 513, 515"


def test_the_provenance_tells_how_many_shards_there_were() -> None:
    payload = builders.v2([[0], [1]], provenance=True)
    del payload["dp_shards"][1], payload["samples"][1]
    messages = {error.code: error.message for error in check(payload).errors}
    assert messages["missing-shard"].startswith("1 of 2 data-parallel shards are there")


def test_samples_after_the_last_scheduled_one_are_not_scheduled_and_no_error() -> None:
    payload = builders.v2(batch=6)
    found = check(payload, builders.rollout(payload))
    assert found.errors == []
    (warning,) = found.warnings
    assert warning.code == "not-scheduled"
    assert "4 of 6" in warning.message
    assert "positions 4, 5" in warning.message


# Case 7


def test_uneven_data_parallel_shards_are_valid() -> None:
    payload = builders.v2([[0, 2, 3], [1]])
    assert [one["rollout_position"] for one in payload["samples"]] == [0, 1, 2, 3]
    assert [one["data_parallel_rank"] for one in payload["samples"]] == [0, 1, 0, 0]
    found = check(payload, builders.rollout(payload))
    assert (found.errors, found.warnings) == ([], [])


def test_samples_out_of_order_are_an_error() -> None:
    payload = builders.v2()
    payload["samples"][1], payload["samples"][2] = payload["samples"][2], payload["samples"][1]
    error = only_error(check(payload))
    assert (error.code, error.sample) == ("order", 2)
    assert "rollout_position is 1 after 2" in error.message


# Case 13


def test_a_length_mismatch_names_sample_field_and_numbers_and_the_rest_is_still_checked() -> None:
    payload = builders.v2()
    one = payload["samples"][2]
    one.update(response_lengths=456, total_lengths=512, tokens=torch.arange(512))
    one["loss_masks"] = torch.ones(456, dtype=torch.int32)
    one["rollout_mask_sums"] = torch.tensor(456.0)
    one["advantages"] = one["log_probs"] = torch.zeros(456)
    one["rollout_log_probs"] = torch.zeros(812)
    payload["samples"][3]["advantages"] = torch.zeros(2)
    found = check(payload)
    first, second = found.errors
    assert (first.code, first.sample, first.field, first.file) == ("length", 2, "rollout_log_probs", "7.pt")
    assert first.message == "sample 2: rollout_log_probs has 812 values, but the response has 456 tokens of 512 in all"
    assert (second.sample, second.field) == (3, "advantages")


def test_the_same_mismatch_is_found_in_the_rollout_dump(tmp_path: Path) -> None:
    source = builders.rollout()
    source["samples"][1].update(
        tokens=[1] * 512, response_length=456, loss_mask=[1] * 456, rollout_log_probs=[-0.5] * 812
    )
    (error,) = validate_files([builders.save(source, tmp_path / "7.pt")]).errors
    assert (error.code, error.sample, error.field) == ("length", 1, "rollout_log_probs")
    assert all(number in error.message for number in ("456", "812", "512"))


@pytest.mark.parametrize(
    ("field", "value", "numbers"),
    [
        ("tokens", torch.arange(5), ("5", "6")),
        ("loss_masks", torch.ones(4), ("4", "3", "6")),
        ("log_probs", torch.zeros(2), ("2", "3", "6")),
        ("advantages", torch.zeros(6), ("6", "3")),
        ("rollout_log_probs", [-0.1] * 4, ("4", "3", "6")),
    ],
)
def test_every_field_with_a_length_is_checked(field: str, value: Any, numbers: tuple[str, ...]) -> None:
    payload = builders.v2()
    payload["samples"][1][field] = value
    error = next(error for error in check(payload).errors if error.code == "length")
    assert (error.sample, error.field) == (1, field)
    assert all(number in error.message for number in numbers)


def test_fields_that_slime_forgot_are_a_warning_in_native_files_and_an_error_in_ours() -> None:
    native, ours = builders.v2(), builders.v2(provenance=True)
    for payload in (native, ours):
        for one in payload["samples"]:
            one["ref_entropy"] = torch.zeros(3)
        payload["samples"][0]["ref_entropy"] = torch.zeros(1)
    found = check(native)
    assert (found.errors, [warning.code for warning in found.warnings]) == ([], ["unrestored-shard"])
    assert only_error(check(ours)).field == "ref_entropy"


# Case 14


def test_a_text_sample_beside_images_keeps_its_none() -> None:
    payload = builders.v2()
    for one in payload["samples"]:
        one["multimodal_train_inputs"] = None
    payload["samples"][1]["multimodal_train_inputs"] = {"pixel_values": torch.zeros(4, 1176)}
    found = check(payload)
    assert (found.errors, found.warnings) == ([], [])
    del payload["samples"][0]["multimodal_train_inputs"]
    (warning,) = check(payload).warnings
    assert (warning.code, warning.sample, warning.field) == ("uneven-field", 0, "multimodal_train_inputs")


# Case 15


@pytest.mark.parametrize(
    ("offsets", "fault"),
    [
        ([0, 2, 2, 5], None),
        ([0, 2, 2, 4], "ends in 4, but there are 5 ids"),
        ([1, 2, 2, 5], "starts with 1, expected 0"),
        ([0, 3, 2, 5], "falls somewhere"),
        ([0, 2, 5], "has 3 entries, expected 3 response tokens + 1"),
        (None, "belong together"),
    ],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_top_p_offsets_are_ragged_over_the_response(
    offsets: list[int] | None, fault: str | None, as_tensor: bool
) -> None:
    payload = builders.v2()
    for one in payload["samples"]:
        one["rollout_top_p_token_ids"] = torch.arange(5)
        one["rollout_top_p_token_offsets"] = [0, 2, 2, 5]
    value = torch.tensor(offsets) if as_tensor and offsets is not None else offsets
    payload["samples"][2]["rollout_top_p_token_offsets"] = value
    found = check(payload)
    if fault is None:
        assert found.errors == []
        return
    error = only_error(found)
    assert (error.code, error.sample, error.field) == ("top-p-offsets", 2, "rollout_top_p_token_offsets")
    assert fault in error.message


# NaN


def test_the_token_that_no_rank_owns_may_be_nan_and_any_other_is_a_warning() -> None:
    payload = builders.v2([[0]])
    payload["samples"][0].update(builders.sample(0, total=3, response=3))
    payload["samples"][0]["log_probs"] = torch.tensor([torch.nan, -1.0, -2.0])
    found = check(payload)
    assert (found.errors, found.warnings) == ([], [])
    payload["samples"][0]["log_probs"] = torch.tensor([torch.nan, -1.0, torch.nan])
    found = check(payload)
    assert found.errors == []
    assert [(w.code, w.sample, w.field) for w in found.warnings] == [("nan", 0, "log_probs")]
    assert "at 1 response tokens, the first at index 2" in found.warnings[0].message


# Structure and schedule


def test_all_faults_are_reported_not_the_first() -> None:
    payload = builders.v2()
    payload["rank"] = "zero"
    payload["samples"][0]["tokens"] = "abc"
    del payload["samples"][1]["loss_masks"]
    payload["samples"][2]["response_lengths"] = -1
    payload["samples"][3]["log_probs"] = {"a": 1}
    found = {(error.code, error.sample, error.field) for error in check(payload).errors}
    assert found >= {
        ("structure", None, "rank"),
        ("type", 0, "tokens"),
        ("missing-field", 1, "loss_masks"),
        ("type", 2, "response_lengths"),
        ("type", 3, "log_probs"),
    }


@pytest.mark.parametrize("key", ["format_version", "rollout_id", "rank", "samples", "dp_shards"])
@pytest.mark.parametrize("value", ["absent", None, "text", 3.5, [1, 2]])
def test_a_broken_top_level_is_reported_and_never_crashes(key: str, value: Any) -> None:
    payload = builders.v2()
    if value == "absent":
        del payload[key]
    else:
        payload[key] = value
    assert any((error.code, error.field) == ("structure", key) for error in check(payload, builders.rollout()).errors)


@pytest.mark.parametrize("value", [None, "text", 3.5, [], {}, [None], torch.zeros(2, 2), torch.tensor(-1.0), True])
def test_no_value_of_any_sample_or_shard_field_crashes_the_validator(value: Any) -> None:
    for holder in ("samples", "dp_shards"):
        for name in builders.v2()[holder][0]:
            payload = builders.v2()
            payload[holder][0][name] = value
            check(payload, builders.rollout())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("micro_batch_indices", [[0], [0]], "repeats 0"),
        ("micro_batch_indices", [[0]], "leaves out 1"),
        ("micro_batch_indices", [[0], [2]], "names 2"),
        ("micro_batch_indices", [0, 1], "no list of lists"),
        ("num_microbatches", [3], "adds up to 3, but there are 2 micro-batches"),
        ("num_microbatches", [1, 1], "for 2 steps, but global_batch_sizes for 1"),
        ("global_batch_sizes", [3], "another shard has [4]"),
    ],
)
def test_a_schedule_that_disagrees_with_the_samples_is_an_error(name: str, value: Any, message: str) -> None:
    payload = builders.v2()
    payload["dp_shards"][1][name] = value
    errors = [error for error in check(payload).errors if error.code == "schedule"]
    assert any(message in error.message for error in errors), errors


def test_a_shard_whose_partition_is_not_that_of_its_samples_is_an_error() -> None:
    payload = builders.v2()
    payload["dp_shards"][0]["partition"] = [0, 1]
    error = only_error(check(payload))
    assert (error.code, error.field) == ("shard-mismatch", "partition")


# With a rollout dump


def test_raw_reward_is_compared_with_the_rollout_and_rewards_never_is() -> None:
    payload = builders.v2()
    source = builders.rollout(payload)
    payload["samples"][1]["rewards"] = -123.0
    assert check(payload, source).errors == []
    payload["raw_reward"][2] = 9.0
    error = only_error(check(payload, source))
    assert (error.code, error.sample, error.field) == ("reward-mismatch", 2, "raw_reward")
    assert error.message == "sample 2: raw_reward is 9.0, but the rollout's reward is 2.0"


@pytest.mark.parametrize(
    ("change", "ok"),
    [
        ({"reward": None}, True),
        ({"reward": {"math": 1.0, "code": 0.0}}, True),
        ({"reward": {"math": 5.0, "code": 0.0}}, False),
        ({"reward": 5.0, "metadata": {"raw_reward": 1.0}}, True),
        ({"reward": 1.0, "metadata": {"raw_reward": 5.0}}, False),
    ],
)
def test_rewards_that_are_none_a_dict_or_in_the_metadata(change: dict[str, Any], ok: bool) -> None:
    payload = builders.v2()
    source = builders.rollout(payload)
    source["samples"][1].update(change)
    assert [error.code for error in check(payload, source).errors] == ([] if ok else ["reward-mismatch"])


def test_tokens_that_differ_are_named_with_the_first_of_them() -> None:
    payload = builders.v2()
    source = builders.rollout(payload)
    source["samples"][3]["tokens"][4] = 999
    error = only_error(check(payload, source))
    assert (error.code, error.sample) == ("tokens-differ", 3)
    assert error.message == "sample 3: token 4 is 304, but 999 in rollout sample 3"


def test_a_position_outside_the_rollout_is_an_error() -> None:
    payload = builders.v2()
    source = builders.rollout(payload)
    del source["samples"][3]
    codes = [(error.code, error.sample) for error in check(payload, source).errors]
    assert ("extra-position", 3) in codes


@pytest.mark.parametrize("name", ["eval_7.pt", "8.pt"])
def test_a_rollout_of_another_kind_or_id_is_never_compared(name: str, tmp_path: Path) -> None:
    payload = builders.v2()
    source = builders.rollout(payload)
    source["samples"][0]["tokens"] = [1]
    if name == "8.pt":
        source["rollout_id"] = 8
    train = builders.save(payload, tmp_path / "7.pt")
    report = validate_files([train], rollout=builders.save(source, tmp_path / name))
    assert [error.code for error in report.errors] == ["wrong-rollout"]


# Files


def test_an_unreadable_file_is_an_error_and_the_others_are_still_checked(tmp_path: Path) -> None:
    (tmp_path / "empty.pt").touch()
    payload = builders.v2()
    payload["samples"][1]["log_probs"] = torch.zeros(1)
    bad = builders.save(payload, tmp_path / "bad.pt")
    report = validate_files([tmp_path / "empty.pt", tmp_path / "absent.pt", bad])
    assert [(error.code, Path(error.file).name) for error in report.errors] == [
        ("unreadable", "empty.pt"),
        ("unreadable", "absent.pt"),
        ("length", "bad.pt"),
    ]
    assert all("\n" not in error.message for error in report.errors)


def test_a_rollout_argument_that_is_no_rollout_dump_is_refused(tmp_path: Path) -> None:
    train = builders.save(builders.v2(), tmp_path / "7.pt")
    with pytest.raises(DumpFormatError, match="is a train-v2 dump, not a rollout dump"):
        validate_files([train], rollout=train)


def test_ranks_of_one_data_parallel_group_count_once(tmp_path: Path) -> None:
    files = [
        builders.save(builders.rank_file(rank, partition), tmp_path / f"7_{rank}.pt")
        for rank, partition in enumerate([[0, 2], [0, 2], [1, 3], [1, 3]])
    ]
    assert validate_files(files).errors == []
    assert [e.code for e in validate_files(files[:2]).errors] == ["coverage"]
    assert [e.code for e in validate_files([*files, files[0]]).errors] == ["duplicate"]


def test_a_rank_file_may_hold_parts_of_responses_but_not_more_than_them(tmp_path: Path) -> None:
    payload = builders.rank_file(0, [0, 1, 2, 3])
    payload["rollout_data"]["log_probs"][1] = torch.zeros(1)
    assert validate_files([builders.save(payload, tmp_path / "a.pt")]).errors == []
    payload["rollout_data"]["log_probs"][1] = torch.zeros(4)
    (error,) = validate_files([builders.save(payload, tmp_path / "b.pt")]).errors
    assert (error.code, error.sample, error.field) == ("length", 1, "log_probs")


def test_validating_long_lists_takes_little_more_memory_than_the_file(tmp_path: Path) -> None:
    n = 100_000
    sample = {"index": 0, "tokens": list(range(2 * n)), "response_length": n, "reward": 1.0}
    sample["rollout_log_probs"] = [-0.001 * i for i in range(n)]
    path = builders.save({"rollout_id": 0, "samples": [sample]}, tmp_path / "0.pt")
    validate_files([path])  # imports
    tracemalloc.start()
    try:
        assert validate_files([path]).valid
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1.5 * path.stat().st_size


@pytest.mark.parametrize("far", [10**6, 10**12, 2**62])
def test_numbers_far_outside_take_no_more_time_than_others(tmp_path: Path, far: int) -> None:
    payload = builders.v2()
    del payload["raw_reward"]
    payload["samples"][3]["rollout_position"] = far
    payload["dp_shards"][1]["data_parallel_rank"] = far
    codes = {error.code for error in validate_files([builders.save(payload, tmp_path / "0.pt")]).errors}
    assert codes >= {"coverage", "missing-shard"}
