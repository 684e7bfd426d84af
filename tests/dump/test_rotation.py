"""Which rollouts are dumped, and that rotation removes what this run wrote and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_instrument._dump.rotation import Rotation, is_due
from slime_instrument._settings import Pins, Settings


@pytest.mark.parametrize(
    ("every", "pin", "due"),
    [(1, (), [0, 1, 2, 3, 4, 5]), (2, (), [0, 2, 4]), (3, ((1, 1), (4, 5)), [0, 1, 3, 4, 5]), (100, (), [0])],
)
def test_every_nth_rollout_and_every_pinned_one_is_due(
    every: int, pin: tuple[tuple[int, int], ...], due: list[int]
) -> None:
    settings = Settings(every=every, pin=Pins(pin))
    assert [rollout_id for rollout_id in range(6) if is_due(settings, rollout_id)] == due


def write(folder: Path, rotation: Rotation, *rollout_ids: int) -> list[str]:
    for rollout_id in rollout_ids:
        path = folder / f"{rollout_id}.pt"
        path.write_text("x")
        rotation.wrote(rollout_id, path)
    return sorted(path.name for path in folder.iterdir())


def test_without_a_limit_nothing_is_removed(tmp_path: Path) -> None:
    assert write(tmp_path, Rotation(Settings()), 0, 1, 2) == ["0.pt", "1.pt", "2.pt"]


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    assert write(tmp_path, Rotation(Settings(keep_last=2)), 0, 1, 2, 3) == ["2.pt", "3.pt"]


def test_pinned_ones_are_kept_beside_the_last_ones(tmp_path: Path) -> None:
    settings = Settings(keep_last=1, pin=Pins(((0, 1),)))
    assert write(tmp_path, Rotation(settings), 0, 1, 2, 3) == ["0.pt", "1.pt", "3.pt"]


def test_what_another_run_wrote_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "7.pt").write_text("another run's")
    assert write(tmp_path, Rotation(Settings(keep_last=1)), 8, 9) == ["7.pt", "9.pt"]


def test_a_rollout_written_again_counts_as_the_newest(tmp_path: Path) -> None:
    assert write(tmp_path, Rotation(Settings(keep_last=2)), 0, 1, 0, 2) == ["0.pt", "2.pt"]


def test_a_path_that_all_rollouts_share_is_never_removed(tmp_path: Path) -> None:
    rotation, path = Rotation(Settings(keep_last=1)), tmp_path / "t.pt"
    path.write_text("x")
    for rollout_id in range(3):
        assert rotation.wrote(rollout_id, path) == []
    assert path.exists()


def test_a_dump_that_somebody_removed_already_is_no_error_and_not_reported(tmp_path: Path) -> None:
    rotation = Rotation(Settings(keep_last=1))
    write(tmp_path, rotation, 0)
    (tmp_path / "0.pt").unlink()
    (tmp_path / "1.pt").write_text("x")
    assert rotation.wrote(1, tmp_path / "1.pt") == []


def test_a_file_that_somebody_put_in_the_place_of_a_dump_stays(tmp_path: Path) -> None:
    rotation = Rotation(Settings(keep_last=1))
    write(tmp_path, rotation, 0)
    (tmp_path / "mine").write_text("a copy of my own")
    (tmp_path / "mine").replace(tmp_path / "0.pt")
    assert write(tmp_path, rotation, 1) == ["0.pt", "1.pt"]


def test_a_dump_that_cannot_be_removed_costs_nothing_but_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rotation = Rotation(Settings(keep_last=1))
    (tmp_path / "0.pt").mkdir()
    rotation.wrote(0, tmp_path / "0.pt")
    assert write(tmp_path, rotation, 1) == ["0.pt", "1.pt"]
    assert "rotation could not remove" in caplog.text
