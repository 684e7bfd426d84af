"""Paths that cannot work for the whole run are refused with their reason; those that can are left alone."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_instrument._dump.template import check_template, check_writable, dump_path, dump_template
from slime_instrument._errors import TrainingPathError


def args(template: Any, **more: Any) -> SimpleNamespace:
    given = {
        "save_debug_train_data": template,
        "num_rollout": 2,
        "start_rollout_id": 0,
        "save_debug_rollout_data": None,
    }
    return SimpleNamespace(**{**given, **more})


@pytest.mark.parametrize(
    ("template", "path"),
    [
        ("d/{rollout_id}.pt", "d/7.pt"),
        ("d/{rollout_id}_{rank}.pt", "d/7_3.pt"),
        ("d/{rollout_id:06d}.pt", "d/000007.pt"),
        ("{rollout_id}/{rollout_id}.pt", "7/7.pt"),
        ("{{x}}{rollout_id}.pt", "{x}7.pt"),
        (Path("d") / "{rollout_id}.pt", "d/7.pt"),
        ("ü {rollout_id}", "ü 7"),
    ],
)
def test_a_path_that_can_work_is_taken_as_it_is(template: Any, path: str) -> None:
    assert check_template(args(template)) == str(template)
    assert dump_path(str(template), 7, 3) == Path(path)


REFUSED = {
    "unknown placeholder": ("{rollout_id}_{step}.pt", "only {rollout_id} and {rank} as placeholders", "{step}"),
    "two of them": ("{rollout_id}_{b}_{a}.pt", "only {rollout_id} and {rank}", "{a}, {b}"),
    "positional": ("{}.pt", "only {rollout_id} and {rank}", "{}"),
    "numbered": ("{0}.pt", "only {rollout_id} and {rank}", "{0}"),
    "attribute": ("{rollout_id.real}.pt", "only {rollout_id} and {rank}", "{rollout_id.real}"),
    "item": ("{rank[0]}{rollout_id}.pt", "only {rollout_id} and {rank}", "{rank[0]}"),
    "open brace": ("{rollout_id.pt", "a path template that can be filled in", "'{rollout_id.pt'"),
    "closed brace": ("rollout_id}.pt", "a path template that can be filled in", "'rollout_id}.pt'"),
    "bad format": ("{rollout_id:q}.pt", "a path template that can be filled in", "'{rollout_id:q}.pt'"),
    "bad conversion": ("{rollout_id!z}.pt", "a path template that can be filled in", "'{rollout_id!z}.pt'"),
    "nested unknown": ("{rollout_id:{width}}.pt", "a path template that can be filled in", "'{rollout_id:{width}}.pt'"),
    "no rollout": ("t.pt", "a different file for each rollout", "a path without {rollout_id}, for several rollouts"),
    "rank alone": (
        "{rank}.pt",
        "a different file for each rollout",
        "a path without {rollout_id}, for several rollouts",
    ),
    "cut away": ("{rollout_id!s:.0}.pt", "a different file for each rollout", "a path without {rollout_id}"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_path_that_cannot_work_is_refused_in_one_message_of_five_parts(kind: str) -> None:
    template, expected, found = REFUSED[kind]
    with pytest.raises(TrainingPathError) as raised:
        check_template(args(template))
    message = str(raised.value)
    assert message.startswith(f"slime_instrument: --save-debug-train-data {template}: expected {expected}")
    assert f"found {found}" in message
    assert message.endswith(
        "Training is not started, because its dumps would be lost. Use a path such as dumps/train_data/{rollout_id}.pt."
    )


@pytest.mark.parametrize(
    ("num_rollout", "start", "fine"), [(1, 0, True), (5, 4, True), (2, None, False), (2, 0, False), (None, 0, False)]
)
def test_a_path_without_rollout_id_is_fine_for_a_single_rollout_only(num_rollout: Any, start: Any, fine: bool) -> None:
    given = args("t.pt", num_rollout=num_rollout, start_rollout_id=start)
    if fine:
        assert check_template(given) == "t.pt"
    else:
        with pytest.raises(TrainingPathError):
            check_template(given)


@pytest.mark.parametrize(
    ("rollout", "same"),
    [
        ("d/{rollout_id}.pt", True),
        ("./d/../d/{rollout_id}.pt", True),
        ("link/{rollout_id}.pt", True),
        ("e/{rollout_id}.pt", False),
        ("d/rollout_{rollout_id}.pt", False),
        ("d/{unknown}.pt", False),
        ("d/{rollout_id", False),
        (None, False),
    ],
)
def test_the_rollout_dumps_path_is_refused_however_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rollout: Any, same: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d").mkdir()
    (tmp_path / "link").symlink_to("d")
    given = args("d/{rollout_id}.pt", save_debug_rollout_data=rollout)
    if same:
        with pytest.raises(TrainingPathError, match="another path than --save-debug-rollout-data, found the same path"):
            check_template(given)
    else:
        assert check_template(given) == "d/{rollout_id}.pt"


@pytest.mark.parametrize(
    ("template", "details", "expected"),
    [
        ("x/train_data/{rollout_id}_{rank}.pt", "x", "x/train_data/{rollout_id}.pt"),
        ("x/train_data/{rollout_id}.pt", "x", "x/train_data/{rollout_id}.pt"),
        ("x/train_data/{rollout_id}_{rank}.pt", None, "x/train_data/{rollout_id}_{rank}.pt"),
        ("y/{rollout_id}_{rank}.pt", "x", "y/{rollout_id}_{rank}.pt"),
    ],
)
def test_only_the_path_that_dump_details_makes_becomes_one_file_per_rollout(
    template: str, details: str | None, expected: str
) -> None:
    assert dump_template(args(template, dump_details=details)) == expected


def test_the_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    check_writable(str(tmp_path / "a" / "{rollout_id}.pt"), 0)
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize("kind", ["a file in the folder's place", "below a file", "no such place"])
def test_a_folder_that_takes_no_files_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "f").write_text("x")
    folder = {"a file in the folder's place": tmp_path / "f", "below a file": tmp_path / "f" / "g"}.get(
        kind, Path("/proc/self")
    )
    with pytest.raises(TrainingPathError, match=r"in which files can be made, found [A-Z]") as raised:
        check_writable(str(folder / "{rollout_id}.pt"), 0)
    assert f"expected a folder {folder}" in str(raised.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(TrainingPathError, match="Permission denied"):
            check_writable(str(tmp_path / "{rollout_id}.pt"), 0)
    finally:
        tmp_path.chmod(0o700)
