"""The v2 payload: order, places, and nothing at the top that does not belong there."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_instrument._dump.agree import Seen
from slime_instrument._dump.contribute import contribute
from slime_instrument._dump.payload import Restored, build_payload, left_out, provenance, put_together

from .ranks import payload_of, sharded, topology


def part(data_rank: int, partition: list[int] | None, count: int | None = None, **more: Any) -> Restored:
    n = count if count is not None else len(partition or ())
    data: dict[str, Any] = {"response_lengths": [1] * n, "total_lengths": [2] * n, **more}
    if partition is not None:
        data["partition"] = partition
    place = replace(topology(dp=9, dp_rank=data_rank), rank=data_rank * 10)
    (restored,) = put_together([contribute(data, place, (), provenance={"of": data_rank})], 1, ())
    return restored


def positions(payload: dict[str, Any]) -> list[Any]:
    return [sample.get("rollout_position") for sample in payload["samples"]]


def test_uneven_ranks_are_ordered_by_position() -> None:
    payload = build_payload([part(0, [0, 2, 3]), part(1, [1])], rollout_id=4, writer_rank=6)
    assert positions(payload) == [0, 1, 2, 3]
    assert [sample["data_parallel_rank"] for sample in payload["samples"]] == [0, 1, 0, 0]
    assert (payload["format_version"], payload["rollout_id"], payload["rank"]) == (2, 4, 6)


def test_siblings_with_the_same_index_or_none_are_ordered_by_position() -> None:
    siblings: dict[str, Any] = {"rollout_ids": [70, 70], "sample_indices": [7, 7]}
    others: dict[str, Any] = {"rollout_ids": [70, 80], "sample_indices": [7, 8]}
    payload = build_payload([part(0, [2, 0], **siblings), part(1, [3, 1], **others)], rollout_id=5, writer_rank=0)
    assert positions(payload) == [0, 1, 2, 3]
    assert [sample["rollout_ids"] for sample in payload["samples"]] == [70, 80, 70, 70]
    assert payload["rollout_id"] == 5
    nameless = [part(0, [2, 0], sample_indices=[None, None]), part(1, [3, 1], sample_indices=[None, None])]
    assert positions(build_payload(nameless, rollout_id=0, writer_rank=0)) == [0, 1, 2, 3]


def test_without_positions_the_sample_index_orders() -> None:
    parts = [part(0, None, 2, sample_indices=[514, 512]), part(1, None, 1, sample_indices=[513])]
    payload = build_payload(parts, rollout_id=0, writer_rank=0)
    assert [sample["sample_index"] for sample in payload["samples"]] == [512, 513, 514]


@pytest.mark.parametrize("indices", [None, [None, 3], ["b", "a"], [[1], [0]]])
def test_without_either_the_samples_stay_in_gather_order_and_a_warning_says_so(
    indices: list[Any] | None, caplog: pytest.LogCaptureFixture
) -> None:
    more = {} if indices is None else {"sample_indices": indices}
    payload = build_payload([part(1, None, 2, **more), part(0, None, 1)], rollout_id=8, writer_rank=0)
    assert [sample["data_parallel_rank"] for sample in payload["samples"]] == [1, 1, 0]
    assert "samples of rollout 8 carry neither positions nor indices" in caplog.text


def test_one_rank_without_positions_takes_the_order_from_the_index_for_all() -> None:
    parts = [part(0, [1, 0], sample_indices=[11, 10]), part(1, None, 1, sample_indices=[9])]
    payload = build_payload(parts, rollout_id=0, writer_rank=0)
    assert [sample["sample_index"] for sample in payload["samples"]] == [9, 10, 11]


def test_positions_may_be_tensors() -> None:
    parts = [part(0, [torch.tensor(2), torch.tensor(0)]), part(1, [torch.tensor(1)])]  # type: ignore[list-item]
    assert [int(p) for p in positions(build_payload(parts, rollout_id=0, writer_rank=0))] == [0, 1, 2]


def test_per_sample_fields_go_to_samples_the_schedule_to_shards_and_the_whole_batch_to_the_top() -> None:
    data: dict[str, Any] = {
        "raw_reward": [0.0, 1.0],
        "tokens": [torch.arange(2), torch.arange(3)],
        "rewards": torch.tensor([0.5, -0.5]),
        "micro_batch_indices": [[0], [1]],
        "num_microbatches": [2],
        "global_batch_sizes": [2],
        "dynamic_global_batch_size": 2,
        "note": "text",
        "log_probs_of_nobody": [1],
    }
    payload = build_payload([part(0, [1, 0], **data)], rollout_id=0, writer_rank=3)
    assert set(payload) == {"format_version", "rollout_id", "rank", "samples", "dp_shards", "raw_reward"}
    first = payload["samples"][0]
    assert set(first) == {
        "data_parallel_rank", "rollout_position", "tokens", "rewards", "response_lengths", "total_lengths",
    }  # fmt: skip
    assert first["tokens"].tolist() == [0, 1, 2]
    assert float(first["rewards"]) == -0.5
    (layout,) = payload["dp_shards"]
    assert layout["partition"] == [1, 0]
    assert layout["sample_indices"] is None
    assert (layout["micro_batch_indices"], layout["num_microbatches"]) == ([[0], [1]], [2])
    assert (layout["note"], layout["log_probs_of_nobody"], layout["dynamic_global_batch_size"]) == ("text", [1], 2)
    assert (layout["rank"], layout["data_parallel_rank"], layout["provenance"]) == (0, 0, {"of": 0})


def test_a_schedule_as_long_as_the_batch_is_still_a_schedule() -> None:
    payload = build_payload([part(0, [0, 1], num_microbatches=[1, 1])], rollout_id=0, writer_rank=0)
    assert "num_microbatches" not in payload["samples"][0]
    assert payload["dp_shards"][0]["num_microbatches"] == [1, 1]


def test_an_empty_shard_keeps_its_place() -> None:
    payload = build_payload([part(0, []), part(1, [0])], rollout_id=0, writer_rank=0)
    assert positions(payload) == [0]
    assert [layout["partition"] for layout in payload["dp_shards"]] == [[], [0]]


def test_a_rollout_without_samples_gives_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert build_payload([part(0, None, 0)], rollout_id=0, writer_rank=0)["samples"] == []
    assert caplog.text == ""


def test_whole_batch_fields_come_from_whichever_rank_has_them_and_from_the_first_that_has() -> None:
    payload = build_payload([part(0, [1]), part(1, [0], raw_reward=[0.0, 1.0])], rollout_id=0, writer_rank=0)
    assert payload["raw_reward"] == [0.0, 1.0]
    both = [part(0, [1], raw_reward=["first"]), part(1, [0], raw_reward=["second"])]
    assert build_payload(both, rollout_id=0, writer_rank=0)["raw_reward"] == ["first"]


def test_fields_that_are_left_out_on_any_rank_are_named() -> None:
    parts = [part(0, [0], x=[torch.empty(1, device="meta")]), part(1, [1], y=[torch.empty(1, device="meta")])]
    payload = build_payload(parts, rollout_id=0, writer_rank=0)
    assert left_out(payload).keys() == {"x", "y"}
    assert "meta device" in left_out(payload)["x"]
    assert all({"x", "y"}.isdisjoint(sample) for sample in payload["samples"])


def test_tensors_in_the_file_share_few_storages() -> None:
    """A storage is a member of the file's archive; ten thousand of them are slow to write and to read."""
    tokens = [torch.arange(3) for _ in range(200)]
    payload = build_payload([part(0, list(range(200)), tokens=tokens, more=tokens)], rollout_id=0, writer_rank=0)
    found = {sample[name].untyped_storage().data_ptr() for sample in payload["samples"] for name in ("tokens", "more")}
    assert len(found) == 1


@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.complex64, torch.float8_e4m3fn, torch.float32])
def test_no_value_of_any_type_takes_more_room_in_the_file_than_it_has_bytes(dtype: torch.dtype, cp: int) -> None:
    """A field of the whole batch's samples, and one that context parallelism cuts; the writer's own part, too."""
    values = [torch.arange(length * 8, dtype=torch.uint8).view(dtype) for length in (5, 4)]
    lengths = [value.numel() for value in values]
    data = {
        "total_lengths": [length + 3 for length in lengths],
        "response_lengths": lengths,
        "partition": [0, 1],
        "cut": values,
        "more": values,
    }
    samples = payload_of([[sharded(data, cp, rank, ["cut"]) for rank in range(cp)]], ["cut"])["samples"]
    for name in ("cut", "more"):
        assert all(
            torch.equal(one[name].view(torch.uint8), v.view(torch.uint8))
            for one, v in zip(samples, values, strict=True)
        )
        (room,) = {one[name].untyped_storage().nbytes() for one in samples}
        assert room == 9 * 8


def test_the_payload_loads_with_weights_only() -> None:
    file = io.BytesIO()
    torch.save(build_payload([part(0, [0], tokens=[torch.arange(2)])], rollout_id=0, writer_rank=0), file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["samples"][0]["tokens"].tolist() == [0, 1]


# ---------------------------------------------------------------------------------------------------------------------
# Provenance


def described(data: dict[str, Any], seen: Seen, **args: Any) -> dict[str, Any]:
    fields = ("rollout_log_probs", "log_probs", "values", "returns")
    return provenance(data, SimpleNamespace(**args), topology(cp=2, dp=3), seen, fields)


def test_provenance_says_where_each_response_level_field_comes_from() -> None:
    data = {"rollout_log_probs": [1], "log_probs": [1], "values": None, "returns": [1], "partition": [0]}
    came = frozenset({"rollout_log_probs", "values"})
    found = described(data, Seen(came_with_rollout=came, positions_from="partition", route="tests"))
    assert found["fields"] == {"rollout_log_probs": "rollout", "log_probs": "recomputed", "returns": "recomputed"}
    assert (found["positions"], found["route"]) == ("partition", "tests")
    assert [found[f"{name}_parallel"] for name in ("tensor", "pipeline", "context", "data")] == [1, 1, 2, 3]
    assert {"slime_instrument", "torch"} <= found.keys()
    by_us = described(data, Seen(log_probs=[torch.zeros(1)], optimizer_steps=[2], weight_version=7))
    assert by_us["fields"]["log_probs"] == "captured"
    assert (by_us["captured_optimizer_steps"], by_us["weight_version"]) == ([2], 7)
    assert described(data, Seen(captured_by_slime=True))["fields"]["log_probs"] == "captured"
    assert "captured_optimizer_steps" not in found
    assert "weight_version" not in found


def test_provenance_says_in_words_why_log_probs_are_absent() -> None:
    found = described({"returns": [1]}, Seen(why_no_log_probs="the loss computes none", positions_from="partition"))
    assert found["log_probs"] == "the loss computes none"
    assert found["positions"] == "unknown"  # no partition, whatever the hooks say
    assert "log_probs" not in described({"log_probs": [1]}, Seen(why_no_log_probs="unused"))


def test_only_plain_arguments_are_recorded_and_the_types_stay() -> None:
    found = described({}, Seen(), gamma=0.5, use_tis=True, loss_type="policy_loss", eps_clip=None, kl_coef=object())
    assert found["arguments"] == {"gamma": 0.5, "use_tis": True, "loss_type": "policy_loss"}
    assert found["qkv_format"] == "thd"


def test_the_provenance_says_what_each_optimizer_step_came_to() -> None:
    results = (
        (0, {"loss": torch.tensor(1.5), "clipfrac": 0.25, "odd": "text", "many": torch.ones(2)}, torch.tensor(2.0)),
        (1, None, None),
    )
    seen = Seen(step_results=results)
    described = provenance({}, SimpleNamespace(), topology(), seen, ())
    assert described["steps"] == [
        {"step": 0, "grad_norm": 2.0, "losses": {"loss": 1.5, "clipfrac": 0.25}},
        {"step": 1, "grad_norm": None, "losses": {}},
    ]


def test_what_training_changes_in_place_after_the_dump_is_in_the_file_as_it_was() -> None:
    text, number, column = bytearray(b"right"), torch.ones(3), [[bytearray(b"right")], [torch.ones(2)]]
    expanded = torch.ones(1).expand(4)
    found = build_payload(
        [part(0, [0, 1], text=text, number=number, column=column, expanded=expanded)], rollout_id=0, writer_rank=0
    )
    text[:] = b"wrong"
    column[0][0][:] = b"wrong"  # type: ignore[index]
    for tensor in (number, column[1][0], expanded):
        tensor.fill_(7)  # type: ignore[union-attr]
    (shard,) = found["dp_shards"]
    assert shard["text"] == b"right"
    assert torch.equal(shard["number"], torch.ones(3))
    assert torch.equal(shard["expanded"], torch.ones(4))
    first, second = found["samples"]
    assert first["column"] == [b"right"]
    assert torch.equal(second["column"][0], torch.ones(2))


@pytest.mark.parametrize("kind", ["list", "dict", "tuple"])
def test_a_nest_as_deep_as_pickle_takes_is_in_the_file_and_the_recursion_limit_as_before(kind: str) -> None:
    nest: Any = torch.ones(2)
    depth = (sys.getrecursionlimit() - 300) // 2
    for _ in range(depth):
        nest = {"list": lambda inner: [inner], "dict": lambda inner: {"x": inner}, "tuple": lambda inner: (inner,)}[
            kind
        ](nest)
    limit = sys.getrecursionlimit()
    found = build_payload([part(0, [0, 1], nest=nest)], rollout_id=0, writer_rank=0)
    assert sys.getrecursionlimit() == limit
    (shard,) = found["dp_shards"]
    assert "left_out" not in shard["provenance"]
    inner = shard["nest"]
    for _ in range(depth):
        inner = inner["x"] if kind == "dict" else inner[0]
    assert torch.equal(inner, torch.ones(2))
