"""Per-rank files of miles and Relax, made after the functions that write them: one v2 file with the very values, or a
refusal.

miles since 62a66297b (2026-08-17): slime's columns, with ``cp_rank``, ``cp_size`` and ``qkv_format`` beside them. Relax
at 2765d18a: the same columns as one dict per sample, every tensor a list, every list cut to as many entries as the rank
has samples.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument import compare
from slime_instrument._convert import convert_dump, convert_files
from slime_instrument._convert.layout import Layout
from slime_instrument._dump.zigzag import owned
from slime_instrument._errors import DumpFormatError
from slime_instrument._format.dumps import read_train_dump
from slime_instrument._format.pairs import identify
from slime_instrument._format.summary import inspect_dump
from slime_instrument._validate import validate_files

LENGTHS = {0: [(17, 9), (13, 5)], 1: [(8, 6), (5, 3)]}  # data-parallel rank -> total and response of each sample
FIELDS = ("rollout_log_probs", "log_probs", "advantages", "entropy")


def tokens(dp: int, i: int) -> torch.Tensor:
    return torch.arange(LENGTHS[dp][i][0]) + 100 * dp + 50 * i


def value(name: str, dp: int, i: int) -> torch.Tensor:
    """Of a whole response."""
    whole = -torch.arange(1, LENGTHS[dp][i][1] + 1, dtype=torch.float32) / 16
    return whole - 10 * dp - i - FIELDS.index(name) / 4


def columns(layout: Layout, rank: int, padded: int | None = None) -> dict[str, Any]:
    """What ``rank`` holds after training."""
    place = layout.place(rank)
    lengths = LENGTHS[place.dp]
    data: dict[str, Any] = {
        "tokens": [tokens(place.dp, i) for i in (0, 1)],
        "total_lengths": [total for total, _ in lengths],
        "response_lengths": [response for _, response in lengths],
        "loss_masks": [torch.ones(response, dtype=torch.int32) for _, response in lengths],
        "rewards": [0.5, -0.5],
        "sample_indices": [place.dp, 2 + place.dp],
        "raw_reward": [0.0, 1.0, 2.0, 3.0],
        "global_batch_sizes": [4],
    }
    for name in FIELDS if place.pp == layout.pp - 1 else FIELDS[:1]:
        data[name] = []
        for i, (total, response) in enumerate(lengths):
            front, back = owned(total, response, layout.cp, place.cp, padded)
            whole = value(name, place.dp, i)
            data[name].append(torch.cat([whole[front.start : front.stop], whole[back.start : back.stop]]))
    if padded is not None:
        data["max_seq_lens"] = [padded] * 2
    return data


def miles(folder: Path, layout: Layout, padded: int | None = None, **more: Any) -> list[Path]:
    paths = []
    for rank in range(layout.world):
        said = {"cp_rank": layout.place(rank).cp, "cp_size": layout.cp, "qkv_format": "bshd" if padded else "thd"}
        paths.append(folder / f"7_{rank}.pt")
        data = columns(layout, rank, padded)
        torch.save({"rollout_id": 7, "rank": rank, "rollout_data": data, **said, **more}, paths[-1])
    return paths


def relax(folder: Path, layout: Layout) -> list[Path]:
    paths = []
    for rank in range(layout.world):
        samples: list[dict[str, Any]] = [{"sample_index": i, "decoded_tokens": []} for i in (0, 1)]
        for name, column in columns(layout, rank).items():
            for i, sample in enumerate(samples):
                one = column[i] if i < len(column) else None
                sample[name] = one.tolist() if torch.is_tensor(one) else one
        paths.append(folder / f"7_{rank}.pt")
        torch.save({"rollout_id": 7, "rank": rank, "samples": samples}, paths[-1])
    return paths


def rollout(folder: Path) -> Path:
    """The rollout dump: the samples of both ranks by turns."""
    samples = [
        {
            "index": 2 * i + dp,
            "tokens": tokens(dp, i).tolist(),
            "response_length": LENGTHS[dp][i][1],
            "loss_mask": [1] * LENGTHS[dp][i][1],
            "rollout_log_probs": value("rollout_log_probs", dp, i).tolist(),
            "reward": float(2 * i + dp),
            "status": "completed",
        }
        for i in (0, 1)
        for dp in (0, 1)
    ]
    torch.save({"rollout_id": 7, "samples": samples}, folder / "rollout.pt")
    return folder / "rollout.pt"


def assert_whole(payload: dict[str, Any]) -> None:
    assert [sample["rollout_position"] for sample in payload["samples"]] == [0, 1, 2, 3]
    for position, sample in enumerate(payload["samples"]):
        i, dp = divmod(position, 2)
        assert torch.equal(sample["tokens"], tokens(dp, i))
        assert torch.equal(sample["loss_masks"], torch.ones(LENGTHS[dp][i][1], dtype=torch.int32))
        for name in FIELDS:
            assert torch.equal(sample[name], value(name, dp, i)), name


LAYOUTS = [Layout(1, 1, 1, 2), Layout(1, 1, 2, 2), Layout(2, 1, 2, 2), Layout(1, 2, 2, 2), Layout(1, 1, 4, 2)]


@pytest.mark.parametrize("framework", [miles, relax])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"tp{layout.tp}pp{layout.pp}cp{layout.cp}")
def test_files_become_one_dump_with_the_very_values(tmp_path: Path, framework: Any, layout: Layout) -> None:
    source = rollout(tmp_path)
    converted = convert_files(framework(tmp_path, layout), tmp_path / "v2.pt", rollout=source)
    assert (converted.layout.cp, converted.layout.dp, converted.layout.how) == (layout.cp, 2, "inferred")
    assert_whole(converted.payload)
    assert validate_files([tmp_path / "v2.pt"], rollout=source).errors == []
    assert compare(source, tmp_path / "v2.pt").n_joined == 4


def test_files_of_miles_padded_to_one_length_are_cut_where_they_say(tmp_path: Path) -> None:
    assert_whole(convert_files(miles(tmp_path, Layout(1, 1, 2, 2), padded=20), tmp_path / "v2.pt").payload)


@pytest.mark.parametrize("told", [False, True])
def test_files_of_miles_tell_apart_what_equal_lengths_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """The last 6 tokens of 16 are cut into 3 and 3, so that swapped files fit, too, but for what they say."""
    monkeypatch.setitem(LENGTHS, 0, [(16, 6), (16, 6)])
    monkeypatch.setitem(LENGTHS, 1, [(16, 6), (16, 6)])
    paths = miles(tmp_path, Layout(1, 1, 2, 2), **({} if told else {"cp_rank": None, "cp_size": None}))
    payloads = [torch.load(path, weights_only=True) for path in paths]
    for rank, path in enumerate(paths):
        torch.save({**payloads[rank ^ 1], "rank": rank}, path)
    if told:
        with pytest.raises(DumpFormatError, match="says that it is of context-parallel rank 1, not 0"):
            convert_dump(read_train_dump(paths), tp=1, pp=1)
        return
    (first, *_) = convert_dump(read_train_dump(paths), tp=1, pp=1, cp=2).payload["samples"]
    assert not torch.equal(first["log_probs"], value("log_probs", 0, 0))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"cp_size": 4}, "no sizes of tensor, pipeline and context parallelism explain them"),
        ({"cp_rank": 2}, "says that it is of context-parallel rank 2 of 2"),
        ({"cp_size": "2"}, "has 2 under cp_size"),
        ({"qkv_format": "bshd"}, "bshd without max_seq_lens"),
        ({"qkv_format": "sbhd"}, "has the layout sbhd, expected thd or bshd"),
    ],
)
def test_what_the_files_of_miles_say_must_fit_them(tmp_path: Path, said: dict[str, Any], why: str) -> None:
    with pytest.raises(DumpFormatError, match=why):
        convert_dump(read_train_dump(miles(tmp_path, Layout(1, 1, 2, 2), **said)))


def test_a_size_that_differs_from_what_the_files_say_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DumpFormatError, match="they say context-parallel size 2, and 1 was given"):
        convert_dump(read_train_dump(miles(tmp_path, Layout(1, 1, 2, 2))), cp=1)


def test_only_files_of_the_last_stage_need_the_sizes(tmp_path: Path) -> None:
    """Newer miles writes no others."""
    paths = miles(tmp_path, Layout(1, 2, 2, 2))[4:]
    with pytest.raises(DumpFormatError, match="several layouts fit"):
        convert_dump(read_train_dump(paths))
    converted = convert_dump(read_train_dump(paths), tp=1, pp=2)
    assert converted.layout == Layout(1, 2, 2, 2)
    assert_whole(converted.payload)


def test_a_file_of_relax_is_a_rank_file_without_what_relax_cut(tmp_path: Path) -> None:
    path = relax(tmp_path, Layout(1, 1, 2, 2))[1]
    assert identify(path).kind == inspect_dump(path)["kind"] == "train-rank"
    assert inspect_dump(path)["n_samples"] == 2
    (rank,) = read_train_dump(path).ranks
    assert rank.cut == ("raw_reward", "global_batch_sizes")
    assert not {"raw_reward", "global_batch_sizes", "sample_index", "decoded_tokens"} & set(rank.rollout_data)
    converted = convert_dump(read_train_dump(relax(tmp_path, Layout(1, 1, 2, 2))))
    assert "raw_reward" not in converted.payload
    assert any("left out: global_batch_sizes, raw_reward, of which" in one for one in converted.warnings)


def test_chunks_that_relax_padded_otherwise_are_refused(tmp_path: Path) -> None:
    """For images it pads each sample to a multiple of tp x cp x 2, and its files do not say so."""
    paths = relax(tmp_path, Layout(1, 1, 2, 2))
    for rank, path in enumerate(paths):
        payload = torch.load(path, weights_only=True)
        for i, sample in enumerate(payload["samples"]):
            total, response = LENGTHS[rank // 2][i]
            front, back = owned(total, response, 2, rank % 2, total + 8)
            whole = value("log_probs", rank // 2, i).tolist()
            sample["log_probs"] = whole[front.start : front.stop] + whole[back.start : back.stop]
        torch.save(payload, path)
    with pytest.raises(DumpFormatError, match="Nothing was converted"):
        convert_dump(read_train_dump(paths))


@pytest.mark.parametrize("samples", [{}, [1], "x"])
def test_a_rank_without_samples_is_refused(tmp_path: Path, samples: Any) -> None:
    torch.save({"rollout_id": 7, "rank": 0, "samples": samples}, tmp_path / "7_0.pt")
    with pytest.raises(DumpFormatError, match="Not read"):
        read_train_dump(tmp_path / "7_0.pt")
