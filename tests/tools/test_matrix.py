"""The matrix's own judgement: it sees what is wrong, and says what was not run. Nothing is trained here."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.matrix import page, runs
from tools.matrix.agreement import check_agrees
from tools.matrix.checks import Verdict
from tools.matrix.compare import differences, from_native, from_single
from tools.matrix.layouts import LAYOUTS
from tools.matrix.plan import LAST_WITHOUT, RELEASES, Cell, absent, cells, checkouts
from tools.matrix.recipes import RECIPES
from tools.matrix.results import Results
from tools.matrix.shards import from_shards


def payload() -> dict[str, Any]:
    """Two samples on two data-parallel ranks; the second without a prompt."""

    def sample(position: int, total: int, values: list[float]) -> dict[str, Any]:
        return {
            "data_parallel_rank": position,
            "rollout_position": position,
            "sample_index": position,
            "tokens": torch.arange(total),
            "total_lengths": total,
            "response_lengths": len(values),
            "log_probs": torch.tensor(values),
            "ref_entropy": torch.tensor(values) / 2,
            "rewards": 0.5,
        }

    samples = [sample(0, 9, [-0.1, -0.2, -0.3]), sample(1, 4, [math.nan, -1.0, -2.0, -3.0])]
    shards = [
        {"rank": rank * 2, "data_parallel_rank": rank, "sample_indices": [rank], "partition": [rank], "provenance": {}}
        for rank in range(2)
    ]
    head = {"format_version": 2, "rollout_id": 0, "rank": 0}
    return {**head, "samples": samples, "dp_shards": shards, "raw_reward": [1.0, 0.0]}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.zeros(0, 2), torch.zeros(0)),
        ([1, 2], (1, 2)),
        ([1], [1, 1]),
        (1, 1.0),
        (True, 1),
        (None, 0),
        (0.1, 0.1 + 1e-17 * 2),
        ({"a": 1}, {"a": 1, "b": None}),
    ],
)
def test_values_that_are_not_the_same_bits_differ(one: Any, other: Any) -> None:
    found = list(differences(one, other))
    if repr(one) == repr(other):
        assert found == []  # 0.1 + 2e-17 is 0.1
    else:
        assert len(found) == 1


def test_equal_trees_and_nan_in_the_same_place_do_not_differ() -> None:
    assert list(differences(payload(), payload())) == []
    assert list(differences(math.nan, math.nan)) == []


def native(cp: int) -> dict[str, Any]:
    """What slime itself writes for the same run: no provenance, 0.0 for the token that no rank owns, part of the field
    that its list forgot."""
    theirs = copy.deepcopy(payload())
    for shard in theirs["dp_shards"]:
        del shard["provenance"]
    theirs["samples"][1]["log_probs"][0] = 0.0
    theirs["samples"][0]["ref_entropy"] = theirs["samples"][0]["ref_entropy"][1:] if cp > 1 else torch.zeros(3)
    theirs["samples"][1]["ref_entropy"][0] = 0.0
    return theirs


def test_only_the_two_deliberate_differences_from_native_slime_are_let_pass() -> None:
    assert list(from_native(payload(), native(2), 2)) == []
    assert any("ref_entropy" in text for text in from_native(payload(), native(1), 1))
    changed = native(2)
    changed["samples"][0]["log_probs"] = changed["samples"][0]["log_probs"].flip(0)
    assert list(from_native(payload(), changed, 2)) == ["samples[0].log_probs: 2 of 3 values differ"]
    zero = native(2)
    zero["samples"][0]["log_probs"][0] = 0.0
    assert list(from_native(payload(), zero, 2)) != [], "a zero where there is a prompt is no gap"


def single() -> dict[str, Any]:
    one = copy.deepcopy(payload())
    one["samples"][1]["log_probs"][0] = -7.0
    one["samples"][1]["ref_entropy"][0] = -7.0
    return one


def compare(ours: dict[str, Any]) -> tuple[list[str], float]:
    return from_single(ours, single(), tolerance=1e-5, exact=True, cp=2)


def test_a_layout_may_differ_from_the_single_process_by_rounding_of_log_probs_only() -> None:
    near = payload()
    near["samples"][0]["log_probs"] = near["samples"][0]["log_probs"] + 4e-6
    found, largest = compare(near)
    assert found == []
    assert largest == pytest.approx(4e-6, rel=0.1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: p["samples"][0].update(log_probs=p["samples"][0]["log_probs"] + 1e-4),
        lambda p: p["samples"][0].update(log_probs=p["samples"][0]["log_probs"].roll(1)),
        lambda p: p["samples"][0].update(log_probs=torch.full((3,), math.nan)),
        lambda p: p["samples"][0].update(rewards=0.5000001),
        lambda p: p["samples"][0].update(tokens=p["samples"][0]["tokens"].roll(1)),
        lambda p: p["samples"][0].pop("log_probs"),
        lambda p: p["samples"][1]["log_probs"].__setitem__(0, 0.0),
        lambda p: p["samples"].pop(),
        lambda p: p.update(raw_reward=[0.0, 1.0]),
    ],
)
def test_anything_else_is_told(spoil: Any) -> None:
    ours = payload()
    spoil(ours)
    assert compare(ours)[0] != []


def write_shards(folder: Path) -> list[Path]:
    """slime's per-rank files of the first sample on two context-parallel ranks: rank 0 owns nothing of it."""
    paths = []
    for rank, values in enumerate([[], [-0.1, -0.2, -0.3]]):
        data = {
            "tokens": [torch.arange(9)],
            "total_lengths": [9],
            "response_lengths": [3],
            "log_probs": [torch.tensor(values)],
            "rewards": [0.5],
            "sample_indices": [0],
            "raw_reward": [1.0, 0.0],
            "partly": None,
        }
        paths.append(folder / f"0_{rank}.pt")
        torch.save({"rollout_id": 0, "rank": rank, "rollout_data": data}, paths[-1])
    return paths


def test_every_value_of_slimes_per_rank_files_is_looked_for(tmp_path: Path) -> None:
    files, layout = write_shards(tmp_path), LAYOUTS["DP2-CP2"]
    assert list(from_shards(payload(), files, layout)) == []
    swapped = payload()
    swapped["samples"][0]["log_probs"] = swapped["samples"][0]["log_probs"].flip(0)
    assert [text.split(":")[0] for text in from_shards(swapped, files, layout)] == ["rank 1 log_probs[0]"]
    lacking = payload()
    del lacking["samples"][0]["rewards"]
    assert len(list(from_shards(lacking, files, layout))) == 2


def test_the_rule_covers_every_release_with_every_layout_and_every_recipe() -> None:
    planned = list(cells(RELEASES))
    assert len(planned) == len(set(planned))
    listed = {layout.name for layout in LAYOUTS.values() if layout.listed}
    assert {(cell.release, cell.layout) for cell in planned} >= {(r, name) for r in RELEASES for name in listed}
    assert {(c.release, c.recipe) for c in planned} == {(release, recipe) for release in RELEASES for recipe in RECIPES}
    assert {cell.layout for cell in planned if cell.recipe == "ppo" and cell.release == LAST_WITHOUT} == {
        "DP2-CP2",
        "TP2-PP2-CP2",
    }
    assert len(listed) == 12


def test_a_layout_that_a_release_does_not_know_is_absent_and_not_run(tmp_path: Path) -> None:
    source = tmp_path / "slime" / "backends" / "megatron_utils"
    source.mkdir(parents=True)
    cell = Cell("v0.2.0", "allgather-CP2", "grpo", "default")
    assert absent(cell, tmp_path) == "no allgather_cp at this release"
    assert absent(Cell("v0.2.0", "CP2", "grpo", "default"), tmp_path) is None
    assert absent(Cell("v0.2.0", "DP2-CP2", "opd", "default"), tmp_path) == "came with v0.2.3"


def test_slices_of_the_matrix_may_write_one_results_file(tmp_path: Path) -> None:
    one, other = Cell("v0.2.0", "CP2", "grpo", "default"), Cell("main", "CP2", "grpo", "default")
    Results(tmp_path / "r.json").add({one: Verdict("ok", {"a": "ok"}, {"log_probs": 1e-6})}, "code1")
    Results(tmp_path / "r.json").add({other: Verdict("failed", {"a": "no"}, reason="a: no")}, "code2")
    found = json.loads((tmp_path / "r.json").read_text())
    assert {key: value["status"] for key, value in found.items()} == {one.key: "ok", other.key: "failed"}


def test_the_page_tells_ok_failed_slimes_own_faults_and_what_was_not_run_apart(tmp_path: Path) -> None:
    results = Results(tmp_path / "r.json")
    results.add(
        {
            Cell("v0.2.0", "CP2", "grpo", "default"): Verdict("ok", {}, {"log_probs": 2e-6}),
            Cell("v0.2.1", "CP2", "grpo", "default"): Verdict("failed", {"weights": "no"}, reason="weights: `no`"),
            Cell("v0.2.2", "CP2", "grpo", "default"): Verdict("slime-cannot", reason="IndexError: too far"),
            Cell("v0.2.3", "CP2", "grpo", "default"): Verdict("absent", reason="not there"),
        },
        "now",
    )
    text = page.render(results.read(), {}, "now")
    row = next(line for line in text.splitlines() if line.startswith("| CP2 |"))
    assert [part.strip() for part in row.strip("|").split("|")][:6] == [
        "CP2",
        "ok",
        "**failed**",
        "slime: IndexError",
        "–",
        "not run",
    ]
    assert "v0.2.1 / CP2 / grpo / default: `weights: 'no'`" in text
    assert "| CP2 | 2.0e-06 |" in text
    assert "run with other code than now | 0 of 4 cells" in text


def test_check_and_the_run_must_say_the_same_of_every_patch() -> None:
    def patch(state: str, reason: str = "") -> dict[str, str]:
        return {"name": "p", "state": state, "reason": reason}

    assert list(check_agrees([patch("PENDING")], [patch("ACTIVE")])) == []
    assert list(check_agrees([patch("SKIPPED")], [patch("SKIPPED")])) == []
    assert list(check_agrees([patch("PENDING")], [patch("SKIPPED", "none of its modules is imported")])) == []
    assert list(check_agrees([patch("PENDING")], [patch("INCOMPATIBLE")])) != []
    assert list(check_agrees([patch("INCOMPATIBLE")], [patch("ACTIVE")])) != []
    assert list(check_agrees([], [patch("ACTIVE")])) != []


def test_a_checkout_of_main_counts_as_main_whatever_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("main-0123abc", "v0.2.0", "somebody-elses"):
        (tmp_path / name / "slime").mkdir(parents=True)
        (tmp_path / name / "slime" / "__init__.py").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(
        "SLIME_SOURCES", ":".join(str(tmp_path / name) for name in sorted(p.name for p in tmp_path.iterdir()))
    )
    assert checkouts() == {"main": tmp_path / "main-0123abc", "v0.2.0": tmp_path / "v0.2.0"}


@pytest.mark.parametrize("samples", ["edge:no-prompt", "edge:masked,no-prompt"])
def test_a_cell_without_a_prompt_makes_the_run_that_tells_what_slime_does_alone(samples: str) -> None:
    cell = Cell("main", "DP2-CP2", "grpo", samples)
    assert cell.single_plain in cell.runs


def test_the_fingerprint_of_the_code_knows_what_it_does_and_not_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "_PACKAGE", tmp_path)
    file = tmp_path / "_dump" / "file.py"
    file.parent.mkdir()

    def fingerprint(text: str) -> str:
        file.write_text(text)
        return runs.code_fingerprint()

    first = fingerprint('"""One."""\nclass A:\n    size: int = 1  # MiB\n    """Of a piece."""\n')
    assert fingerprint("class A:\n    size: int = 1\n") == first
    assert fingerprint("class A:\n    size: int = 2\n") != first
    assert fingerprint('class A:\n    size: int = 1\n    name = "a text that is used"\n') != first
    (tmp_path / "_cli").mkdir()
    (tmp_path / "_cli" / "app.py").write_text("what only reads = 1")
    assert fingerprint("class A:\n    size: int = 1\n") == first
