"""Old per-rank files become one v2 dump with the very values, or are refused.

`tests/data/old_dumps.zip` holds files that uninstrumented slime wrote, and what the instrumented run of that release
wrote instead; both come from real training on CPU ranks.
"""

from __future__ import annotations

import copy
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._analysis.compare import compare
from slime_instrument._convert import Converted, convert_dump, convert_files
from slime_instrument._convert.layout import Layout
from slime_instrument._dump.zigzag import owned
from slime_instrument._errors import DumpFormatError
from slime_instrument._format.dumps import RankData, TrainDump, read_rollout_dump, read_train_dump
from slime_instrument._validate import validate_files
from tests.format import builders

DATA = Path(__file__).parents[1] / "data" / "old_dumps.zip"

# name -> layout of the run: TP, PP, CP, DP
RUNS = {
    "oldest": (1, 1, 2, 2),  # v0.2.1: static batches
    "pipeline": (2, 2, 2, 1),  # v0.2.2: the first stage has no log-probs
    "bshd": (1, 1, 2, 2),  # v0.2.3: chunks of the padded length
    "schedule": (1, 1, 2, 2),  # v0.3.1: dynamic schedule, log-probs only in the loss
}
# What the instrumented run captured and the old files never held.
ONLY_NEW = {"schedule": {"log_probs"}}


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old_dumps")
    with zipfile.ZipFile(DATA) as archive:
        archive.extractall(folder)
    return folder


def old_files(runs: Path, name: str) -> list[Path]:
    return sorted((runs / name / "old").glob("*.pt"))


def same(one: Any, other: Any) -> bool:
    """Equal types, and for tensors equal bits."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.reshape(-1).view(torch.uint8).equal(other.reshape(-1).view(torch.uint8))
        )
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.mark.parametrize("given", [False, True], ids=["inferred", "given"])
@pytest.mark.parametrize("name", RUNS)
def test_old_files_of_a_release_become_what_the_instrumented_run_wrote(runs: Path, name: str, given: bool) -> None:
    files = old_files(runs, name)
    rollout = read_rollout_dump(runs / name / "rollout.pt")
    tp, pp, cp, dp = RUNS[name]
    sizes = {"tp": tp, "pp": pp, "cp": cp} if given else {}
    converted = convert_dump(read_train_dump(files), rollout=rollout, **sizes)
    assert converted.layout == Layout(tp, pp, cp, dp, how="given" if given else "inferred")
    assert converted.warnings == []
    expected = torch.load(runs / name / "new.pt", weights_only=True)
    assert list(converted.payload) == list(expected)
    assert same(converted.payload["raw_reward"], expected["raw_reward"])
    for own, other in zip(converted.payload["samples"], expected["samples"], strict=True):
        for field in ONLY_NEW.get(name, ()):
            del other[field]
        assert list(own) == list(other)
        assert [key for key in own if not same(own[key], other[key])] == []
    for own, other in zip(converted.payload["dp_shards"], expected["dp_shards"], strict=True):
        del own["provenance"], other["provenance"]
        assert same(own, other)


@pytest.mark.parametrize("name", RUNS)
def test_a_converted_file_is_valid_and_joins(runs: Path, name: str, tmp_path: Path) -> None:
    convert_files(old_files(runs, name), tmp_path / "0.pt", rollout=runs / name / "rollout.pt")
    report = validate_files([tmp_path / "0.pt"], rollout=runs / name / "rollout.pt")
    assert report.errors == []
    found = compare(runs / name / "rollout.pt", tmp_path / "0.pt")
    assert found["n_joined"] == found["n_train"] == 8
    assert found["unmatched"] == []


def test_compare_takes_old_files_as_they_are(runs: Path) -> None:
    found = compare(runs / "bshd" / "rollout.pt", old_files(runs, "bshd"))
    assert found["n_joined"] == 8
    assert found["n_tokens"] > 0


def teacher(i: int, n: int) -> torch.Tensor:
    return -torch.arange(1, n + 1, dtype=torch.float32) / 7 - i


@pytest.mark.parametrize("with_prompt", [False, True])
def test_unsliced_teacher_log_probs_are_kept_whole_and_cut_to_the_response(runs: Path, with_prompt: bool) -> None:
    def teach(_rank: int, data: dict[str, Any]) -> None:
        lengths = data["total_lengths" if with_prompt else "response_lengths"]
        data["teacher_log_probs"] = [
            teacher(index, n) for index, n in zip(data["sample_indices"], lengths, strict=True)
        ]

    converted = convert_dump(changed(runs, "oldest", teach))
    for i, sample in enumerate(converted.payload["samples"]):
        response, total = sample["response_lengths"], sample["total_lengths"]
        expected = teacher(i, total if with_prompt else response)[-response:]
        assert sample["teacher_log_probs"].equal(expected)


def test_without_the_rollout_positions_are_those_of_unique_indices(runs: Path) -> None:
    converted = convert_dump(read_train_dump(old_files(runs, "schedule")))
    assert [sample["rollout_position"] for sample in converted.payload["samples"]] == list(range(8))
    assert any("order of sample_indices" in warning for warning in converted.warnings)


def changed(runs: Path, name: str, change: Any) -> TrainDump:
    """The old files of a run with something changed in each."""
    dump = read_train_dump(old_files(runs, name))
    ranks = []
    for rank in dump.ranks:
        data = copy.deepcopy(dict(rank.rollout_data))
        change(rank.rank, data)
        ranks.append(RankData(rank.path, rank.rank, data))
    return TrainDump(dump.paths, "train-rank", None, dump.rollout_id, None, ranks=tuple(ranks))


def test_repeated_indices_leave_positions_unknown_unless_the_rollout_tells(runs: Path) -> None:
    def alike(_rank: int, data: dict[str, Any]) -> None:
        data["sample_indices"] = [7] * len(data["sample_indices"])

    dump = changed(runs, "bshd", alike)
    converted = convert_dump(dump)
    assert all("rollout_position" not in sample for sample in converted.payload["samples"])
    assert any("repeat 7" in warning for warning in converted.warnings)
    told = convert_dump(dump, rollout=read_rollout_dump(runs / "bshd" / "rollout.pt"))
    assert [sample["rollout_position"] for sample in told.payload["samples"]] == list(range(8))


def test_a_data_parallel_shard_without_one_of_its_parts_is_left_out_and_named(runs: Path) -> None:
    files = old_files(runs, "schedule")
    converted = convert_dump(read_train_dump([files[0], files[1], files[3]]), tp=1, pp=1, cp=2)
    assert {sample["data_parallel_rank"] for sample in converted.payload["samples"]} == {0}
    text = " ".join(converted.warnings)
    assert "3 of 4 rank files are there; missing: ranks 2" in text
    assert "data-parallel rank 1 is left out: its context-parallel ranks 0 are missing" in text
    assert "4 of 8 samples" in text
    found = compare(read_rollout_dump(runs / "schedule" / "rollout.pt"), converted.dump)
    assert [finding["code"] for finding in found["findings"]] == ["incomplete"]


def test_nothing_whole_is_refused(runs: Path) -> None:
    with pytest.raises(DumpFormatError, match="no whole data-parallel shard"):
        convert_dump(read_train_dump(old_files(runs, "oldest")[1:2]), tp=1, pp=1, cp=2)


def test_a_missing_last_stage_is_converted_without_what_it_held(runs: Path) -> None:
    converted = convert_dump(read_train_dump(old_files(runs, "pipeline")[:4]), tp=2, pp=2, cp=2)
    assert all("log_probs" not in sample for sample in converted.payload["samples"])
    assert any("last pipeline stage" in warning for warning in converted.warnings)
    full = convert_dump(read_train_dump(old_files(runs, "pipeline")))
    for own, other in zip(converted.payload["samples"], full.payload["samples"], strict=True):
        assert own["rollout_log_probs"].equal(other["rollout_log_probs"])


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 4)])
def test_sizes_that_the_files_contradict_are_refused(runs: Path, sizes: tuple[int, int, int]) -> None:
    tp, pp, cp = sizes
    with pytest.raises(DumpFormatError, match="Nothing was converted"):
        convert_dump(read_train_dump(old_files(runs, "schedule")), tp=tp, pp=pp, cp=cp)


def test_tensor_parallel_ranks_with_other_values_are_refused(runs: Path) -> None:
    def spoil(rank: int, data: dict[str, Any]) -> None:
        data["log_probs"][0] = data["log_probs"][0] + rank

    with pytest.raises(DumpFormatError, match="hold other values"):
        convert_dump(fsdp(2, spoil), tp=2, pp=1, cp=1)


def test_padded_chunks_are_not_taken_for_unpadded_ones(runs: Path) -> None:
    def forget(_rank: int, data: dict[str, Any]) -> None:
        del data["max_seq_lens"]

    with pytest.raises(DumpFormatError, match="Nothing was converted"):
        convert_dump(changed(runs, "bshd", forget))


def fsdp(n: int, change: Any = None, *, log_probs: bool = True, replicas: bool = True) -> TrainDump:
    """Ranks that hold whole responses, as lists."""
    ranks = []
    for rank in range(n):
        own = [0, 1] if replicas else [2 * rank, 2 * rank + 1]
        data: dict[str, Any] = {
            "tokens": [torch.arange(10 * i, 10 * i + 6) for i in own],
            "total_lengths": [6, 6],
            "response_lengths": [3, 4],
            "loss_masks": [torch.ones(3), torch.ones(4)],
            "rollout_log_probs": [[-0.1, -0.2, -0.3], [-1.0, -2.0, -3.0, -4.0]],
            "advantages": [torch.ones(3), torch.ones(4)],
            "sample_indices": own,
            "raw_reward": [0.0] * (2 if replicas else 2 * n),
        }
        if log_probs:
            data["log_probs"] = [torch.full((3,), -1.0), torch.full((4,), -2.0)]
        if change is not None:
            change(rank, data)
        ranks.append(RankData(Path(f"0_{rank}.pt"), rank, data))
    return TrainDump(tuple(rank.path for rank in ranks), "train-rank", None, 0, None, ranks=tuple(ranks))


def test_fsdp_dumps_hold_whole_responses_and_no_log_probs() -> None:
    converted = convert_dump(fsdp(3, log_probs=False, replicas=False))
    assert (converted.layout.cp, converted.layout.dp) == (1, 3)
    assert [sample["rollout_position"] for sample in converted.payload["samples"]] == [0, 1, 2, 3, 4, 5]
    first = converted.payload["samples"][0]
    assert first["rollout_log_probs"].equal(torch.tensor([-0.1, -0.2, -0.3]))
    assert "log_probs" not in first
    assert "not in the old files" in converted.payload["dp_shards"][0]["provenance"]["log_probs"]


def test_tensors_that_lived_on_cuda_are_read_without_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def on_cuda(storage: Any) -> str:
        return "cuda:0"

    paths = []
    for rank in fsdp(2).ranks:
        paths.append(tmp_path / f"0_{rank.rank}.pt")
        with monkeypatch.context() as patched:
            patched.setattr(torch.serialization, "location_tag", on_cuda)
            torch.save({"rollout_id": 0, "rank": rank.rank, "rollout_data": dict(rank.rollout_data)}, paths[-1])
    with zipfile.ZipFile(paths[0]) as archive:
        assert b"cuda:0" in archive.read("0_0/data.pkl")
    converted = convert_dump(read_train_dump(paths), tp=2, pp=1, cp=1)
    assert converted.payload["samples"][1]["log_probs"].equal(torch.full((4,), -2.0))


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-cp-pp-dp"])
def test_any_order_of_ranks_is_found_and_restored(cp: int, order: str) -> None:
    layout = Layout(2, 2, cp, 2, order=order)
    lengths = {0: [(17, 9), (13, 5)], 1: [(8, 6), (3, 2)]}
    ranks = []
    for number in range(layout.world):
        place = layout.place(number)
        data: dict[str, Any] = {
            "tokens": [torch.arange(total) + 100 * place.dp for total, _ in lengths[place.dp]],
            "total_lengths": [total for total, _ in lengths[place.dp]],
            "response_lengths": [response for _, response in lengths[place.dp]],
            "loss_masks": [torch.ones(response) for _, response in lengths[place.dp]],
            "sample_indices": [10 + place.dp, 20 + place.dp],
            "raw_reward": [0.0] * 4,
        }
        values = []
        for total, response in lengths[place.dp]:
            whole = torch.arange(response, dtype=torch.float32) + 1000 * place.dp
            front, back = owned(total, response, cp, place.cp)
            values.append(torch.cat([whole[front.start : front.stop], whole[back.start : back.stop]]))
        data["rollout_log_probs"] = values
        if place.pp == 1:
            data["log_probs"] = [value + 1 for value in values]
        ranks.append(RankData(Path(f"0_{number}.pt"), number, data))
    dump = TrainDump(tuple(rank.path for rank in ranks), "train-rank", None, 0, None, ranks=tuple(ranks))
    converted = convert_dump(dump)
    assert converted.layout == Layout(2, 2, cp, 2, order=order, how="inferred")
    for sample in converted.payload["samples"]:
        whole = torch.arange(sample["response_lengths"], dtype=torch.float32) + 1000 * sample["data_parallel_rank"]
        assert sample["rollout_log_probs"].equal(whole)
        assert sample["log_probs"].equal(whole + 1)


def test_the_output_is_never_one_of_the_inputs(runs: Path, tmp_path: Path) -> None:
    paths = []
    for file in old_files(runs, "oldest"):
        paths.append(tmp_path / file.name)
        paths[-1].write_bytes(file.read_bytes())
    with pytest.raises(DumpFormatError, match="one of the files to convert"):
        convert_files(paths, paths[0])
    assert paths[0].read_bytes() == old_files(runs, "oldest")[0].read_bytes()


def test_the_record_says_what_a_command_prints(runs: Path) -> None:
    converted: Converted = convert_dump(read_train_dump(old_files(runs, "oldest")))
    record = converted.as_dict()
    assert record["n_samples"] == 8
    assert record["layout"] == {"tp": 1, "pp": 1, "cp": 2, "dp": 2, "order": "tp-cp-dp-pp", "how": "inferred"}
    assert isinstance(record["warnings"], list)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("tokens", [torch.zeros(6), torch.zeros(6)], "no list tokens with whole numbers"),
        ("tokens", None, "no list tokens with whole numbers"),
        ("response_lengths", [3], "one per sample"),
        ("response_lengths", [7, 3], "states 7 response tokens of 6 in all for sample 0"),
        ("response_lengths", 3, "one per sample"),
        ("sample_indices", [0, {}], "under sample_indices, expected a whole number for each of 2 samples"),
        ("sample_indices", [0], "under sample_indices"),
        ("sample_indices", 5, "has 5 under sample_indices"),
        ("max_seq_lens", [8], "under max_seq_lens"),
        ("log_probs", [torch.zeros(3), "x"], "has x under log_probs of sample 1, expected numbers"),
        ("log_probs", 1.5, "has 1.5 under log_probs, expected a list"),
    ],
)
def test_columns_that_are_not_what_slime_writes_are_refused_by_name(
    tmp_path: Path, column: str, value: Any, said: str
) -> None:
    payload = builders.rank_file(0, [0, 1], batch=2)
    payload["rollout_data"][column] = value
    path = builders.save(payload, tmp_path / "0_0.pt")
    with pytest.raises(DumpFormatError) as caught:
        convert_files([path], tmp_path / "c.pt")
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "c.pt").exists()


@pytest.mark.parametrize("rank", [-1, 1 << 14, 10**12])
def test_a_rank_that_no_run_has_is_refused_at_once(tmp_path: Path, rank: int) -> None:
    path = builders.save(builders.rank_file(rank, [0, 1], batch=2), tmp_path / "0_0.pt")
    with pytest.raises(DumpFormatError, match=f"is of rank {rank}"):
        convert_files([path], tmp_path / "c.pt")


def test_columns_that_are_tensors_convert_like_lists(tmp_path: Path) -> None:
    payload = builders.rank_file(0, [0, 1], batch=2)
    listed = convert_files([builders.save(payload, tmp_path / "0_0.pt")], tmp_path / "c.pt").payload
    for name in ("sample_indices", "response_lengths", "total_lengths"):
        payload["rollout_data"][name] = torch.tensor(payload["rollout_data"][name])
    found = convert_files([builders.save(payload, tmp_path / "0_0.pt")], tmp_path / "d.pt").payload
    assert same(found, listed)
