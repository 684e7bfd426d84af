"""Which files make a pair, and why the others do not: the same for every command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._cli.app import main
from slime_instrument._format.dumps import is_eval_name, rollout_id_of
from slime_instrument._format.pairs import find_pairs, identify, no_pairs
from slime_instrument._report.build import write_report
from slime_instrument._view.source import choose_files
from tests.format import builders
from tests.report.dumps import write_run


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


def test_nothing_to_pair_says_what_there_is_and_what_is_missing(tmp_path: Path) -> None:
    assert "found no dump files" in str(no_pairs([tmp_path], find_pairs([tmp_path]), "Nothing was done."))
    absent = tmp_path / "absent.pt"
    assert f"{absent}: No such file or directory" in str(no_pairs([absent], find_pairs([absent]), "Nothing was done."))
    builders.save(builders.rollout(builders.v2()) | {"rollout_id": 11}, tmp_path / "rollout_data" / "11.pt")
    builders.save(builders.v2(), tmp_path / "train_data" / "7.pt")
    error = str(no_pairs([tmp_path], find_pairs([tmp_path]), "Nothing was done."))
    assert "found rollout dumps of rollout 11 and train dumps of rollout 7. Nothing was done." in error


def test_a_file_that_cannot_be_read_is_named_once_with_the_reason(tmp_path: Path) -> None:
    cut = tmp_path / "7.pt"
    builders.save(builders.v2(), cut)
    cut.write_bytes(cut.read_bytes()[:500])
    (skipped,) = find_pairs([cut]).skipped
    assert str(skipped).count(str(cut)) == 1
    assert not skipped.reason.endswith(".")
    assert ".." not in str(no_pairs([cut], find_pairs([cut]), "Nothing was done."))


def test_of_two_rollout_dumps_of_one_rollout_the_second_is_named(tmp_path: Path) -> None:
    payload = builders.v2()
    for name in ("7", "copy_of_7"):
        builders.save(builders.rollout(payload), tmp_path / "rollout" / f"{name}.pt")
    train = builders.save(payload, tmp_path / "train" / "7.pt")
    pairing = find_pairs([tmp_path / "rollout", train])
    assert [pair.rollout.name for pair in pairing.pairs] == ["7.pt"]
    assert [one.file.name for one in pairing.skipped] == ["copy_of_7.pt"]
    assert "second dump of rollout 7" in pairing.skipped[0].reason


# Template of the user, as slime fills it in: {} is the id of a rollout, eval_{} that of an evaluation.
TEMPLATES = (
    "{}",
    "rollout_{}",
    "step{}",
    "{}_seed1",
    "seed1_step{}",
    "run.{}",
    "{}/rollout",
    "iter_{}/dump",
    "iter-{}",
)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("stored", [True, False])
def test_each_form_of_name_gives_the_same_pairs_in_compare_report_and_view(
    template: str, stored: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in (3, 12):
        payload = builders.v2()
        payload["rollout_id"] = i
        source: dict[str, Any] = builders.rollout(payload)
        source["rollout_id"] = i
        if not stored:
            del source["rollout_id"]  # as before 2025-07-23
        builders.save(payload, tmp_path / "train_data" / f"{template.format(i)}.pt")
        builders.save(source, tmp_path / "rollout_data" / f"{template.format(i)}.pt")
        builders.save(source, tmp_path / "rollout_data" / f"{template.format(f'eval_{i}')}.pt")
    expected = [tmp_path / "rollout_data" / f"{template.format(i)}.pt" for i in (3, 12)]
    pairing = find_pairs([tmp_path])
    assert [(pair.rollout_id, pair.rollout) for pair in pairing.pairs] == list(zip((3, 12), expected, strict=True))
    assert {one.reason for one in pairing.skipped} == {"dump of an evaluation; no training belongs to it"}
    with pytest.raises(SystemExit):
        main(["compare", str(tmp_path / "rollout_data"), str(tmp_path / "train_data"), "--json"])
    found = json.loads(capsys.readouterr().out)["pairs"]
    assert [(one["rollout"], one["rollout_id"]) for one in found] == [(str(expected[0]), 3), (str(expected[1]), 12)]
    report = write_report([tmp_path], tmp_path / "report.html")
    assert [pair.rollout for pair in report.pairs] == expected
    for i, path in zip((3, 12), expected, strict=True):
        files, at = choose_files([tmp_path], i)
        assert files[at] == (tmp_path / "train_data" / path.relative_to(tmp_path / "rollout_data"), path)


@pytest.mark.parametrize("template", TEMPLATES)
def test_evaluations_are_known_wherever_the_template_has_the_id(template: str) -> None:
    assert is_eval_name(Path(f"dumps/{template.format('eval_7')}.pt"))
    assert not is_eval_name(Path(f"dumps/{template.format('7')}.pt"))
    assert rollout_id_of(Path(f"dumps/{template.format('eval_7')}.pt")) == 7


@pytest.mark.parametrize("name", ["retrieval_7.pt", "retrieval7.pt", "evaluator_7.pt"])
def test_a_word_that_ends_in_eval_is_no_evaluation(name: str) -> None:
    assert not is_eval_name(Path(name))
    assert rollout_id_of(Path(name)) == 7


@pytest.mark.parametrize("name", ["x.pt", "9" * 50 + ".pt"])
def test_a_name_without_a_number_that_counts_gives_no_rollout_id(tmp_path: Path, name: str) -> None:
    payload = builders.v2()
    source = builders.rollout(payload)["samples"]  # a list of samples: only the name could tell
    builders.save(source, tmp_path / "rollout" / name)
    train = builders.save(payload, tmp_path / "train" / "7.pt")
    assert not find_pairs([tmp_path / "rollout", train]).pairs


@pytest.mark.parametrize(
    "order", [("rollout_id", "samples"), ("samples", "rollout_id"), ("note", "rollout_id", "samples")]
)
@pytest.mark.parametrize("rollout_id", [0, 255, 256, 70_000, 2**31, None])
def test_the_id_inside_counts_wherever_it_is(tmp_path: Path, order: tuple[str, ...], rollout_id: int | None) -> None:
    values = {"samples": builders.rollout(builders.v2())["samples"], "rollout_id": rollout_id, "note": "x"}
    path = builders.save({key: values[key] for key in order}, tmp_path / "99.pt")
    assert identify(path).rollout_id == (99 if rollout_id is None else rollout_id)
    assert identify(path).kind == "rollout"


@pytest.mark.parametrize(
    "whole", [b"\x80\x04}\x94(\x8c\x0arollout_idK\x05", b"\x80\x02}q\x00(X\x0a\x00\x00\x00rollout_idK\x05"]
)
def test_a_pickle_that_is_cut_anywhere_is_left_out_and_crashes_nothing(tmp_path: Path, whole: bytes) -> None:
    for length in range(1, len(whole) + 1):
        (tmp_path / f"{length}.pt").write_bytes(whole[:length])
    found = find_pairs([tmp_path])
    assert found.pairs == ()
    assert len(found.skipped) == len(whole)
