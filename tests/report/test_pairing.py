"""Which files make a pair, and why the others do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime_instrument._errors import DumpFormatError
from slime_instrument._report.pairing import find_pairs

from .dumps import write_run


def test_a_folder_gives_its_pairs_in_order_and_names_what_is_left_over(tmp_path: Path) -> None:
    run = write_run(tmp_path, rollouts=11, samples=1, length=2)
    (run / "rollout_data" / "eval_3.pt").write_bytes((run / "rollout_data" / "3.pt").read_bytes())
    (run / "train_data" / "5.pt").unlink()
    (run / "rollout_data" / "6.pt").unlink()
    (run / "train_data" / "7.pt").write_bytes(b"cut short")
    (run / "train_data" / "metrics.jsonl").write_text("{}\n")
    found = find_pairs([run])
    assert [pair.rollout_id for pair in found.pairs] == [0, 1, 2, 3, 4, 8, 9, 10]
    reasons = {one.file.relative_to(run).as_posix(): one.reason for one in found.skipped}
    assert set(reasons) == {
        "rollout_data/eval_3.pt", "rollout_data/5.pt", "train_data/6.pt", "rollout_data/7.pt", "train_data/7.pt"
    }  # fmt: skip
    assert reasons["rollout_data/eval_3.pt"] == "dump of an evaluation; no training belongs to it"
    assert reasons["rollout_data/5.pt"] == "no train dump of rollout 5 beside it"
    assert reasons["train_data/6.pt"] == "no rollout dump of rollout 6 beside it"
    assert "neither a torch file nor a pickle" in reasons["train_data/7.pt"]


def test_two_files_are_a_pair_whatever_their_names(tmp_path: Path) -> None:
    run = write_run(tmp_path, samples=1)
    rollout, train = tmp_path / "sampled.pt", tmp_path / "trained.pt"
    (run / "rollout_data" / "0.pt").rename(rollout)
    (run / "train_data" / "0.pt").rename(train)
    (pair,) = find_pairs([rollout, train]).pairs
    assert (pair.rollout, pair.train) == (rollout, (train,))
    rollout.rename(tmp_path / "step_99.pt")
    (pair,) = find_pairs([train, tmp_path / "step_99.pt"]).pairs
    assert pair.rollout.name == "step_99.pt"


def test_files_of_several_rollouts_are_paired_by_what_is_in_them(tmp_path: Path) -> None:
    run = write_run(tmp_path, rollouts=2, samples=1)
    files = [run / f"{kind}_data" / f"{i}.pt" for kind in ("rollout", "train") for i in (1, 0)]
    renamed = tmp_path / "train_data" / "second.pt"
    files[2].rename(renamed)
    files[2] = renamed
    assert [(pair.rollout.name, pair.train[0].name) for pair in find_pairs(files).pairs] == [
        ("0.pt", "0.pt"), ("1.pt", "second.pt")
    ]  # fmt: skip


def test_the_old_files_of_all_ranks_belong_to_one_pair(tmp_path: Path) -> None:
    run = write_run(tmp_path, samples=1)
    (run / "train_data" / "0.pt").unlink()
    for rank in (0, 1):
        columns = {"tokens": [torch.arange(3)], "response_lengths": [1]}
        payload = {"rollout_id": 0, "rank": rank, "rollout_data": columns}
        torch.save(payload, run / "train_data" / f"0_{rank}.pt")
    (pair,) = find_pairs([run]).pairs
    assert [path.name for path in pair.train] == ["0_0.pt", "0_1.pt"]


def test_another_folder_is_refused_and_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(DumpFormatError, match=r"expected a folder with rollout_data/ and train_data/"):
        find_pairs([tmp_path])
    with pytest.raises(FileNotFoundError):
        find_pairs([tmp_path / "absent.pt"])
