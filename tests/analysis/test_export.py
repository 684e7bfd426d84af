"""Parquet files have the promised schema, every value, and read back elsewhere."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slime_instrument._analysis.export import SCHEMA_VERSION, Level, columns, export, rows
from slime_instrument._errors import DumpError, DumpFormatError
from tests.format import builders

pl = pytest.importorskip("polars")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two train dumps, log-probs in bf16 in the second one, and a rollout dump."""
    for i in range(2):
        payload = builders.v2(responses=[3, 0, 2, 5])
        payload["rollout_id"] = i
        for sample in payload["samples"]:
            sample["total_lengths"] = 6
            if i:
                sample["log_probs"] = sample["log_probs"].bfloat16()
        builders.save(payload, tmp_path / "train_data" / f"{i}.pt")
    dump = builders.rollout()
    dump["samples"][0]["rollout_log_probs"] = [-1.0, None, math.nan]
    dump["samples"][0]["weight_versions"] = ["3", "5"]
    builders.save(dump, tmp_path / "rollout_data" / "7.pt")
    return tmp_path


@pytest.mark.parametrize("level", ["sample", "token"])
def test_the_schema_is_the_declared_one(folder: Path, level: Level) -> None:
    export([folder / "train_data" / "0.pt"], folder / "out.parquet", level=level)
    table = pl.read_parquet(folder / "out.parquet")
    assert table.columns == list(columns(level))
    assert set(table["schema_version"]) == {SCHEMA_VERSION}
    assert pl.read_parquet_metadata(folder / "out.parquet")["slime_instrument.schema_version"] == str(SCHEMA_VERSION)


def test_columns_of_schema_version_1_never_change() -> None:
    assert SCHEMA_VERSION == 1
    assert list(columns("sample"))[:17] == [
        "schema_version", "kind", "file", "rollout_id", "rollout_position", "sample_index", "execution_id",
        "data_parallel_rank", "total_length", "response_length", "trained_tokens", "reward", "raw_reward", "status",
        "removed", "weight_version_min", "weight_version_max",
    ]  # fmt: skip
    assert list(columns("token"))[8:12] == ["token", "token_id", "loss_mask", "rollout_log_probs"]


def test_a_folder_is_one_table_and_bf16_is_in_it(folder: Path) -> None:
    n = export([folder / "train_data"], folder / "out.parquet", level="token")
    table = pl.read_parquet(folder / "out.parquet")
    assert n == len(table) == 2 * (3 + 0 + 2 + 5)
    first = table.filter(rollout_id=1, rollout_position=3)
    assert first["token"].to_list() == [0, 1, 2, 3, 4]
    assert first["token_id"].to_list() == [301, 302, 303, 304, 305]
    expected = (-torch.arange(1, 6, dtype=torch.float32) - 0.1).bfloat16().float()
    assert first["log_probs"].to_list() == expected.tolist()


def test_rows_of_samples_have_their_means_and_rewards(folder: Path) -> None:
    export([folder / "train_data" / "0.pt"], folder / "out.parquet")
    table = pl.read_parquet(folder / "out.parquet").sort("rollout_position")
    assert table["response_length"].to_list() == [3, 0, 2, 5]
    assert table["raw_reward"].to_list() == [0.0, 1.0, 2.0, 3.0]
    assert table["log_probs_mean"].to_list() == [pytest.approx(-2.1), None, pytest.approx(-1.4), pytest.approx(-3.1)]


def test_what_is_missing_is_null_and_nan_stays_nan(folder: Path) -> None:
    export([folder / "rollout_data"], folder / "out.parquet", level="token")
    values = pl.read_parquet(folder / "out.parquet").filter(rollout_position=0)["rollout_log_probs"].to_list()
    assert values[:2] == [-1.0, None]
    assert math.isnan(values[2])
    export([folder / "rollout_data"], folder / "out.parquet")
    first = pl.read_parquet(folder / "out.parquet").row(0, named=True)
    assert (first["weight_version_min"], first["weight_version_max"]) == (3, 5)
    assert first["rollout_log_probs_mean"] == -1.0


def test_a_file_that_is_no_dump_leaves_nothing_behind(folder: Path) -> None:
    (folder / "train_data" / "2.pt").write_bytes(b"no dump")
    with pytest.raises(DumpFormatError, match=r"2\.pt"):
        export([folder / "train_data"], folder / "out.parquet")
    assert [path.name for path in folder.iterdir() if path.is_file()] == []


def test_per_rank_files_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = builders.save(builders.rank_file(0, [0, 1]), tmp_path / "0_0.pt")
    with pytest.raises(DumpFormatError, match="slime-instrument convert"):
        export([path], tmp_path / "out.parquet")


def test_a_place_that_cannot_be_written_is_one_message(folder: Path) -> None:
    (folder / "file").write_text("")
    with pytest.raises(DumpError, match="Nothing was exported"):
        export([folder / "train_data"], folder / "file" / "out.parquet")


@pytest.mark.skipif(importlib.util.find_spec("duckdb") is None, reason="duckdb is not installed")
def test_duckdb_reads_it(folder: Path) -> None:
    import duckdb

    export([folder / "train_data"], folder / "out.parquet", level="token")
    assert duckdb.sql(f"select count(*) from '{folder / 'out.parquet'}'").fetchall() == [(20,)]


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not installed")
def test_the_rows_make_a_pandas_frame(folder: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame(rows(folder / "train_data" / "0.pt", level="token"))
    assert list(frame.columns) == list(columns("token"))
    assert frame["log_probs"].sum() == pytest.approx(-(1 + 2 + 3 + 0.3) - (1 + 2 - 0.2) - (1 + 2 + 3 + 4 + 5 + 0.5))


@pytest.mark.lab
@pytest.mark.filterwarnings("ignore")  # Ray starts processes and threads of its own
def test_ray_data_maps_the_same_function_over_files(folder: Path) -> None:
    for needed in ("ray", "pandas", "pyarrow"):  # Ray Data itself needs the last one
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed")
    program = f"""
import ray
from slime_instrument._analysis.export import rows
ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
files = [{{"path": path}} for path in {[str(path) for path in sorted((folder / "train_data").glob("*.pt"))]!r}]
try:
    table = ray.data.from_items(files).flat_map(lambda item: rows(item["path"], level="token"))
    print("rows", table.count())
finally:
    ray.shutdown()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200)
    assert "rows 20" in done.stdout, done.stderr[-2000:]
