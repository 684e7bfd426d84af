"""Every form of dump is recognised by its content, and read into a record."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._errors import DumpFormatError
from slime_instrument._format.dumps import (
    RolloutDump,
    TrainDump,
    detect_kind,
    read_dump,
    read_rollout_dump,
    read_train_dump,
)

from . import builders


def test_a_v2_dump_is_read_with_samples_shards_and_whole_batch(tmp_path: Path) -> None:
    path = builders.save(builders.v2([[0, 2, 3], [1]]), tmp_path / "7.pt")
    dump = read_train_dump(path)
    assert (dump.kind, dump.format_version, dump.rollout_id, dump.rank, dump.path) == ("train-v2", 2, 7, 0, path)
    assert [one["rollout_position"] for one in dump.samples] == [0, 1, 2, 3]
    assert [one["data_parallel_rank"] for one in dump.samples] == [0, 1, 0, 0]
    assert [shard["partition"] for shard in dump.dp_shards] == [[0, 2, 3], [1]]
    assert dump.whole_batch == {"raw_reward": [0.0, 1.0, 2.0, 3.0]}
    assert dump.ranks == ()


def test_a_samples_rollout_id_is_another_column_than_the_files(tmp_path: Path) -> None:
    payload = builders.v2(indices=[70, 70, 70, 80])
    dump = read_train_dump(builders.save(payload, tmp_path / "7.pt"))
    assert dump.rollout_id == 7
    assert [one["rollout_ids"] for one in dump.samples] == [70, 70, 70, 80]


def test_old_files_of_one_rollout_keep_each_ranks_data_apart(tmp_path: Path) -> None:
    files = [builders.save(builders.rank_file(r, p), tmp_path / f"7_{r}.pt") for r, p in [(1, [1, 3]), (0, [0, 2])]]
    dump = read_train_dump(files)
    assert (dump.kind, dump.format_version, dump.rollout_id, dump.rank) == ("train-rank", None, 7, None)
    assert [(one.rank, one.n_samples) for one in dump.ranks] == [(0, 2), (1, 2)]
    assert dump.ranks[1].sample(1)["sample_indices"] == 3
    assert dump.ranks[1].sample(1)["tokens"].tolist() == list(range(300, 306))
    assert dump.paths == (files[1], files[0])
    assert dump.samples == []


def test_one_old_file_is_a_dump_by_itself(tmp_path: Path) -> None:
    path = builders.save(builders.rank_file(3, [0]), tmp_path / "7_3.pt")
    for dump in (read_train_dump(path), read_train_dump([path]), read_train_dump(str(path))):
        assert (dump.kind, dump.rank, len(dump.ranks)) == ("train-rank", 3, 1)


def test_columns_of_a_rank_leave_out_the_schedule_and_the_whole_batch(tmp_path: Path) -> None:
    payload = builders.rank_file(0, [0, 1], batch=2)
    payload["rollout_data"].update(global_batch_sizes=[1, 1], dynamic_global_batch_size=2, max_seq_lens=[6, 6])
    (rank,) = read_train_dump(builders.save(payload, tmp_path / "7_0.pt")).ranks
    assert "max_seq_lens" in rank.columns
    assert not {"raw_reward", "global_batch_sizes", "dynamic_global_batch_size"} & set(rank.columns)


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"rank": 0}, "is of rank 0, and so is"),
        ({"rank": 1, "rollout_id": 8}, "is of rollout 8"),
    ],
)
def test_old_files_that_do_not_belong_together_are_refused(second: dict[str, Any], reason: str, tmp_path: Path) -> None:
    a = builders.save(builders.rank_file(0, [0]), tmp_path / "a.pt")
    b = builders.save({**builders.rank_file(1, [1]), **second}, tmp_path / "b.pt")
    with pytest.raises(DumpFormatError, match=reason):
        read_train_dump([a, b])


def test_lists_that_make_no_dump_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DumpFormatError, match="at least one file"):
        read_train_dump([])
    whole = builders.save(builders.v2(), tmp_path / "7.pt")
    with pytest.raises(DumpFormatError, match="whole by itself"):
        read_train_dump([whole, builders.save(builders.rank_file(0, [0]), tmp_path / "7_0.pt")])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("7.pt", "rollout"),
        ("eval_7.pt", "rollout-eval"),
        ("run_eval_7.pt", "rollout-eval"),
        ("retrieval_7.pt", "rollout"),
        ("eval_set_7.pt", "rollout"),
    ],
)
def test_an_eval_dump_is_recognised_by_its_name(name: str, kind: str, tmp_path: Path) -> None:
    dump = read_rollout_dump(builders.save(builders.rollout(), tmp_path / name))
    assert (dump.kind, dump.rollout_id, len(dump.samples)) == (kind, 7, 4)


@pytest.mark.parametrize("plain", [True, False], ids=["pickle", "torch"])
def test_a_bare_list_of_samples_takes_its_rollout_id_from_the_name(plain: bool, tmp_path: Path) -> None:
    samples = builders.rollout()["samples"]
    path = tmp_path / "rollout_12.pt"
    if plain:
        path.write_bytes(pickle.dumps(samples))
    else:
        torch.save(samples, path)
    dump = read_rollout_dump(path)
    assert (dump.kind, dump.rollout_id, dump.samples) == ("rollout", 12, samples)


def test_read_dump_reads_whichever_it_is(tmp_path: Path) -> None:
    assert isinstance(read_dump(builders.save(builders.v2(), tmp_path / "a.pt")), TrainDump)
    assert isinstance(read_dump(builders.save(builders.rollout(), tmp_path / "b.pt")), RolloutDump)


def test_the_wrong_reader_says_what_the_file_is(tmp_path: Path) -> None:
    train = builders.save(builders.v2(), tmp_path / "a.pt")
    rollout = builders.save(builders.rollout(), tmp_path / "b.pt")
    with pytest.raises(DumpFormatError, match="is a train-v2 dump, not a rollout dump"):
        read_rollout_dump(train)
    with pytest.raises(DumpFormatError, match="is a rollout dump, not a train dump"):
        read_train_dump(rollout)


@pytest.mark.parametrize("payload", [{}, {"model": {}, "step": 3}, [1, 2], 3, "text", torch.zeros(3), None])
def test_a_torch_file_that_is_no_dump_is_refused(payload: Any, tmp_path: Path) -> None:
    with pytest.raises(DumpFormatError, match="neither a train nor a rollout dump"):
        detect_kind(tmp_path / "a.pt", payload)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format_version": 3}, "has format_version 3; this release reads 2"),
        ({"samples": None}, "no list of dicts under 'samples'"),
        ({"samples": [1]}, "no list of dicts under 'samples'"),
        ({"dp_shards": {}}, "no list of dicts under 'dp_shards'"),
    ],
)
def test_a_v2_dump_that_cannot_be_a_record_is_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = builders.save({**builders.v2(), **change}, tmp_path / "7.pt")
    with pytest.raises(DumpFormatError, match=reason):
        read_train_dump(path)


def test_reading_needs_neither_wrapt_nor_megatron_nor_slime_nor_rich(tmp_path: Path) -> None:
    path = builders.save(builders.v2(), tmp_path / "7.pt")
    program = (
        "import sys\n"
        "for name in ('wrapt', 'megatron', 'slime', 'ray', 'rich', 'typer', 'polars'): sys.modules[name] = None\n"
        "from slime_instrument._format.dumps import read_train_dump\n"
        "from slime_instrument._validate import validate_files\n"
        "assert validate_files([sys.argv[1]]).valid\n"
        "print(len(read_train_dump(sys.argv[1]).samples))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], check=True, capture_output=True, text=True)
    assert done.stdout == "4\n"


def test_the_schema_needs_nothing_but_the_standard_library() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; import slime_instrument._format.schema as s; print(s.FORMAT_VERSION)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert done.stdout == "2\n"
