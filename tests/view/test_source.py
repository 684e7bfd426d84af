"""What the viewer loads, and how files are chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._errors import DumpFormatError
from slime_instrument._view.heat import PAGE, Tokens, printable
from slime_instrument._view.source import Row, Source, choose_files


def test_of_a_folder_the_last_rollout_is_chosen_by_number(write_dumps: Callable[..., Path]) -> None:
    for rollout_id in (9, 10):
        folder = write_dumps(rollout_id=rollout_id)
    (folder / "rollout_data" / "eval_10.pt").write_bytes(b"x")
    both = [(folder / "train_data" / name, folder / "rollout_data" / name) for name in ("9.pt", "10.pt")]
    assert choose_files([folder], None) == (both, 1)
    assert choose_files([folder], 9) == (both, 0)
    with pytest.raises(DumpFormatError, match=r"expected a train dump of rollout 7, found none"):
        choose_files([folder], 7)


def test_files_may_come_in_any_order_and_a_train_dump_alone(write_dumps: Callable[..., Path]) -> None:
    folder = write_dumps()
    train, rollout = folder / "train_data" / "3.pt", folder / "rollout_data" / "3.pt"
    assert choose_files([rollout, train], None) == choose_files([train, rollout], None) == ([(train, rollout)], 0)
    assert choose_files([train], None) == ([(train, None)], 0)
    with pytest.raises(DumpFormatError, match=r"expected a train dump, found none"):
        choose_files([rollout], None)
    with pytest.raises(DumpFormatError, match=r"found .*absent\.pt: No such file or directory"):
        choose_files([folder / "absent.pt"], None)


def test_the_mismatch_of_a_sample_needs_the_train_dump_only(write_dumps: Callable[..., Path]) -> None:
    def edit(train: list[dict[str, Any]], _source: list[dict[str, Any]]) -> None:
        train[4]["loss_masks"][:6] = 0
        train[4]["log_probs"][0] = -99.0  # masked
        train[2]["log_probs"] = None

    source = Source(write_dumps(edit) / "train_data" / "3.pt")
    for place in (2, 4):
        source.measure(place)
    assert source.rows[4].n_tokens == 6
    assert source.rows[4].max_abs == pytest.approx(0.004, abs=1e-6)
    assert (source.rows[2].n_tokens, source.rows[2].mean_abs, source.rows[2].max_abs) == (0, None, None)
    assert source.rows[0].n_tokens is None


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("", True), ("7", True), ("57", True), ("5", False), ("TRUNC", True), ("shift", True), ("completed", False)],
)
def test_a_search_is_a_number_or_part_of_status_or_finding(wanted: str, found: bool) -> None:
    row = Row(place=0, position=7, index=57, length=1, status="truncated", findings=["token-shift"])
    assert row.matches(wanted) is found


def test_an_old_file_of_one_rank_is_refused_with_the_way_on(tmp_path: Path) -> None:
    payload = {"rollout_id": 0, "rank": 0, "rollout_data": {"tokens": [torch.arange(3)], "response_lengths": [1]}}
    torch.save(payload, tmp_path / "0_0.pt")
    with pytest.raises(DumpFormatError, match=r"slime-instrument convert"):
        Source(tmp_path / "0_0.pt")


def test_tokens_are_shown_by_page_with_levels_that_show_without_colour(write_dumps: Callable[..., Path]) -> None:
    def edit(train: list[dict[str, Any]], _source: list[dict[str, Any]]) -> None:
        n = PAGE + 10
        rollout = -torch.ones(n)
        train[0] |= {
            "tokens": torch.arange(n + 4), "total_lengths": n + 4, "response_lengths": n, "advantages": torch.ones(n),
            "loss_masks": torch.ones(n, dtype=torch.int32), "rollout_log_probs": rollout, "log_probs": rollout.clone(),
        }  # fmt: skip
        train[0]["log_probs"][PAGE + 2] = -1.3
        train[0]["log_probs"][5] = -0.98

    source = Source(write_dumps(edit) / "train_data" / "3.pt")
    tokens = Tokens(source.table(0), source.dump.samples[0])
    assert tokens.worst() == [PAGE + 2, 5]
    second = tokens.render(1, "delta", None)
    assert second.plain.split() == [str(4 + PAGE + i) for i in range(10)]
    styled = [second.plain[span.start : span.end] for span in second.spans if getattr(span.style, "underline", False)]
    assert styled == [str(4 + PAGE + 2)]
    for mode in ("advantage", "mask", "rollout", "train"):
        assert tokens.render(0, mode, 3).plain.split()[0] == "4"
    line = tokens.describe(PAGE + 2)
    assert "log μ -1 " in line
    assert "log π -1.3 " in line
    assert "δ -0.3 " in line


def test_control_characters_become_signs() -> None:
    assert printable("a\nb\tc\x1b[31m\u202e\u200f") == "a↵b⇥c·[31m··"
