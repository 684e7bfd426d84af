"""The summary tells types and shapes without reading values; a sample is shown whole, in strict JSON."""

from __future__ import annotations

import json
import pickle
import resource
from pathlib import Path

import pytest
import torch

from slime_instrument._errors import DumpFormatError
from slime_instrument._format.summary import inspect_dump

from . import builders


def test_a_v2_dump_is_summarised_by_field(tmp_path: Path) -> None:
    payload = builders.v2([[0, 2, 3], [1]], responses=[2, 0, 3, 3], provenance=True)
    path = builders.save(payload, tmp_path / "7.pt")
    record = inspect_dump(path)
    head = {key: record[key] for key in ("kind", "format_version", "rollout_id", "rank", "n_samples")}
    assert head == {"kind": "train-v2", "format_version": 2, "rollout_id": 7, "rank": 0, "n_samples": 4}
    assert record["fields"]["log_probs"] == {
        "type": "tensor",
        "dtype": "float32",
        "shape": {"min": [0], "max": [3]},
        "samples": 4,
        "none": 0,
    }
    assert record["fields"]["rewards"]["type"] == "float"
    assert [shard["n_samples"] for shard in record["dp_shards"]] == [3, 1]
    assert record["dp_shards"][0]["partition"] == [0, 2, 3]
    assert record["dp_shards"][0]["provenance"]["fields"]["log_probs"] == "captured"
    assert record["whole_batch"]["raw_reward"]["shape"] == {"min": [4], "max": [4]}
    json.dumps(record, allow_nan=False)


def test_a_mixed_batch_counts_its_nones(tmp_path: Path) -> None:
    payload = builders.v2()
    for one in payload["samples"]:
        one["multimodal_train_inputs"] = None
    payload["samples"][1]["multimodal_train_inputs"] = {"pixel_values": torch.zeros(4, 1176)}
    record = inspect_dump(builders.save(payload, tmp_path / "7.pt"), sample=0)
    summary = record["fields"]["multimodal_train_inputs"]
    assert (summary["type"], summary["samples"], summary["none"]) == ("dict", 4, 3)
    assert record["sample"]["multimodal_train_inputs"] is None


def test_the_kinds_of_old_and_rollout_dumps(tmp_path: Path) -> None:
    old = inspect_dump(builders.save(builders.rank_file(3, [0, 2]), tmp_path / "7_3.pt"), sample=1)
    assert (old["kind"], old["format_version"], old["rank"], old["n_samples"]) == ("train-rank", None, 3, 2)
    assert old["dp_shards"] == [{"rank": 3, "n_samples": 2, "sample_indices": [0, 2]}]
    assert old["sample"]["tokens"] == [200, 201, 202, 203, 204, 205]
    rollout = inspect_dump(builders.save(builders.rollout(), tmp_path / "eval_7.pt"))
    assert (rollout["kind"], rollout["rollout_id"], rollout["n_samples"]) == ("rollout-eval", 7, 4)
    assert rollout["dp_shards"] == []
    (tmp_path / "5.pt").write_bytes(pickle.dumps(builders.rollout()["samples"]))
    assert inspect_dump(tmp_path / "5.pt")["kind"] == "rollout"


def test_values_that_are_not_finite_are_null_and_counted(tmp_path: Path) -> None:
    payload = builders.v2()
    payload["samples"][2]["log_probs"] = torch.tensor([torch.nan, -torch.inf, -3.0])
    record = inspect_dump(builders.save(payload, tmp_path / "7.pt"), sample=2)
    assert record["sample"]["log_probs"] == [None, None, -3.0]
    assert record["sample_non_finite"] == {"log_probs": {"nan": 1, "inf": 0, "negative_inf": 1}}
    json.dumps(record, allow_nan=False)


def test_bf16_is_shown_as_the_numbers_it_holds(tmp_path: Path) -> None:
    payload = builders.v2()
    payload["samples"][0]["log_probs"] = torch.tensor([-0.1234567, 0.0, 1.0], dtype=torch.bfloat16)
    record = inspect_dump(builders.save(payload, tmp_path / "7.pt"), sample=0)
    assert record["sample"]["log_probs"] == [-0.12353515625, 0.0, 1.0]
    assert record["fields"]["log_probs"]["dtype"] == "bfloat16|float32"


@pytest.mark.parametrize("sample", [-1, 4, 512])
def test_a_sample_is_a_position_in_the_file_and_no_index(sample: int, tmp_path: Path) -> None:
    path = builders.save(builders.v2(indices=[512, 513, 514, 515]), tmp_path / "7.pt")
    with pytest.raises(DumpFormatError, match=rf"has samples 0 to 3, but sample {sample} was asked for"):
        inspect_dump(path, sample=sample)
    assert inspect_dump(path, sample=1)["sample"]["sample_index"] == 513


def test_an_empty_dump_has_no_sample_to_show(tmp_path: Path) -> None:
    path = builders.save({**builders.v2(), "samples": []}, tmp_path / "7.pt")
    assert inspect_dump(path)["n_samples"] == 0
    with pytest.raises(DumpFormatError, match="has no samples, but sample 0"):
        inspect_dump(path, sample=0)


def test_a_large_field_is_described_and_not_materialised(tmp_path: Path) -> None:
    payload = builders.v2([[0]])
    payload["samples"][0]["rollout_routed_experts"] = torch.zeros(5, 4, 1 << 20)
    path = tmp_path / "7.pt"
    torch.save(payload, path)
    del payload
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    record = inspect_dump(path)
    pages_read = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert record["bytes"] > 80 << 20
    assert record["fields"]["rollout_routed_experts"]["shape"]["max"] == [5, 4, 1 << 20]
    assert pages_read < 5_000  # 20 MB; the field alone has 20,000 pages


@pytest.mark.parametrize("kind", ["v2", "rank", "rollout"])
def test_long_lists_are_described_as_lists(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 100  # enough for lists of numbers to be read as arrays
    payloads = {
        "v2": lambda: builders.v2([list(range(n))], responses=[2] * n, provenance=True),
        "rank": lambda: {
            "rollout_id": 7,
            "rank": 0,
            "rollout_data": {
                "tokens": [torch.arange(5)] * n,
                "total_lengths": [5] * n,
                "response_lengths": [2] * n,
                "sample_indices": list(range(n)),
                "raw_reward": [0.5] * n,
            },
        },
        "rollout": lambda: {
            "rollout_id": 7,
            "samples": [
                {"index": i, "tokens": list(range(n)), "rollout_log_probs": [-0.5] * n, "loss_mask": [1] * n}
                for i in range(3)
            ],
        },
    }
    path = builders.save(payloads[kind](), tmp_path / "7.pt")
    found = inspect_dump(path, sample=1)
    monkeypatch.setattr(
        "slime_instrument._format.unpickling.load_archive", lambda *_, **__: (torch.load(path), lambda: None)
    )
    assert found == inspect_dump(path, sample=1)
    assert "array" not in json.dumps(found)
