"""instrument.jsonl: what a run says of its own dumps can be read while it runs, and after whatever ended it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from slime_instrument._format import journal
from slime_instrument._format.journal import NAME, RolloutEntry, Writer, read_journal


def start(folder: Path, **more: Any) -> None:
    Writer(folder).append("start", **{**journal.process(), "versions": {"slime": "0.3.1"}, "patches": [], **more})


def states(folder: Path) -> list[tuple[int, str]]:
    return [(one.rollout_id, one.state) for one in read_journal(folder).rollouts]


def test_what_is_appended_can_be_read_at_once(tmp_path: Path) -> None:
    start(tmp_path)
    Writer(tmp_path).append("written", rollout_id=0, path="0.pt", bytes=7, blocked_s=0.5)
    found = read_journal(tmp_path)
    assert found.starts[0]["pid"] == os.getpid()
    (entry,) = found.rollouts
    assert entry == RolloutEntry(0, "written", "0.pt", "", 7, 0.5, {}, entry.time)
    assert entry.time > 1e9
    assert (found.running, found.healthy, found.problems) == (True, True, [])


@pytest.mark.parametrize("where", [".", NAME])
def test_the_file_its_folder_and_a_dump_details_folder_are_all_read(tmp_path: Path, where: str) -> None:
    (tmp_path / "train_data").mkdir()
    start(tmp_path / "train_data")
    for given in (tmp_path, tmp_path / "train_data" / where):
        assert len(read_journal(given).starts) == 1


def test_where_there_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):  # noqa: PT011  # a folder, or nothing at all
        read_journal(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_journal(tmp_path / "nowhere")


def test_a_background_write_is_pending_until_it_is_written_or_lost(tmp_path: Path) -> None:
    start(tmp_path)
    for rollout_id in range(3):
        Writer(tmp_path).append("pending", rollout_id=rollout_id, path=f"{rollout_id}.pt", blocked_s=0.25)
    Writer(tmp_path).append("written", rollout_id=0, path="0.pt", bytes=5)
    Writer(tmp_path).append("lost", rollout_id=1, path="1.pt", reason="disk full")
    assert states(tmp_path) == [(0, "written"), (1, "lost"), (2, "pending")]
    found = read_journal(tmp_path)
    assert [one.blocked_s for one in found.rollouts] == [0.25] * 3
    assert found.healthy is False
    assert "rollout 1 has no dump: disk full" in str(found)
    assert "rollout 2 is being written: 2.pt" in str(found)


def test_removed_by_rotation_is_told_from_lost_and_keeps_what_was_known(tmp_path: Path) -> None:
    start(tmp_path)
    Writer(tmp_path).append("written", rollout_id=0, path="0.pt", bytes=5, blocked_s=1.0)
    Writer(tmp_path).append("removed", rollout_id=0, path="0.pt")
    (entry,) = read_journal(tmp_path).rollouts
    assert (entry.state, entry.size, entry.blocked_s) == ("removed", 5, 1.0)
    assert read_journal(tmp_path).healthy is True


def test_a_rollout_trained_twice_has_two_entries(tmp_path: Path) -> None:
    Writer(tmp_path).append("lost", rollout_id=0, path="0.pt", reason="disk full")
    Writer(tmp_path).append("written", rollout_id=0, path="0.pt", bytes=5)
    assert states(tmp_path) == [(0, "lost"), (0, "written")]


def test_fields_that_a_dump_lacks_are_named_and_not_healthy(tmp_path: Path) -> None:
    Writer(tmp_path).append("written", rollout_id=0, path="0.pt", bytes=5)
    Writer(tmp_path).append("left-out", rollout_id=0, path="0.pt", field="x", reason="it has no data")
    Writer(tmp_path).append("left-out", rollout_id=9, path="9.pt", field="x", reason="of no known rollout")
    found = read_journal(tmp_path)
    assert found.rollouts[0].left_out == {"x": "it has no data"}
    assert found.healthy is False
    assert "rollout 0 lacks x: it has no data" in str(found)


def test_waiting_is_shown_until_anything_else_is_said(tmp_path: Path) -> None:
    start(tmp_path)
    Writer(tmp_path).append("waiting", what="waiting for rank(s) [3] since 10 s")
    assert "now waiting for rank(s) [3] since 10 s" in str(read_journal(tmp_path))
    Writer(tmp_path).append("written", rollout_id=0, path="0.pt", bytes=5)
    assert read_journal(tmp_path).waiting == ""


def test_stepping_out_is_said_until_a_process_starts_anew(tmp_path: Path) -> None:
    start(tmp_path)
    Writer(tmp_path).append("stepped-out", reason="three faults of ours")
    assert read_journal(tmp_path).healthy is False
    assert "this run dumps no more: three faults of ours" in str(read_journal(tmp_path))
    start(tmp_path)
    found = read_journal(tmp_path)
    assert (found.stepped_out, len(found.starts), found.healthy) == ("", 2, True)


def test_patches_that_are_not_active_are_named_with_their_reason(tmp_path: Path) -> None:
    patches = [
        {"name": "a", "state": "ACTIVE", "reason": ""},
        {"name": "b", "state": "INCOMPATIBLE", "reason": "takes (x)"},
    ]
    start(tmp_path, patches=patches)
    Writer(tmp_path).append("note", text="the file system cannot rename")
    text = str(read_journal(tmp_path))
    assert "patch b is INCOMPATIBLE: takes (x)" in text
    assert "patch a" not in text
    assert "note: the file system cannot rename" in text


ODD_LINES = [
    "", "{", "[]", "3", "null", '"x"', '{"event": "written"}', '{"event": "written", "rollout_id": "x"}',
    '{"event": "lost", "rollout_id": null}', '{"event": "written", "rollout_id": 1, "bytes": [1]}',
    '{"event": ["start"]}', '{"event": "written", "rollout_id": 1, "path": 3, "bytes": 5', "\x00\xff",
    '{"event": "written", "rollout_id": 1e400}', '{"event": "written", "rollout_id": 1, "time": "x"}',
]  # fmt: skip


@pytest.mark.parametrize("line", ODD_LINES)
def test_a_line_that_is_cut_or_odd_is_named_and_the_others_count(tmp_path: Path, line: str) -> None:
    start(tmp_path)
    with open(tmp_path / NAME, "a", encoding="utf-8") as file:
        file.write(line + "\n")
    Writer(tmp_path).append("written", rollout_id=7, path="7.pt", bytes=5)
    found = read_journal(tmp_path)
    assert (7, "written") in states(tmp_path)
    assert len(found.problems) <= 1
    assert found.problems == [] or found.problems[0].startswith("line 2 cannot be read")
    json.dumps(found.as_dict(), allow_nan=False)
    str(found)


def test_events_of_a_newer_version_are_passed_over(tmp_path: Path) -> None:
    Writer(tmp_path).append("something-new", x=1)
    assert read_journal(tmp_path).problems == []


def test_a_process_that_ended_is_seen_and_what_it_had_pending_is_not_healthy(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from slime_instrument._format import journal\n"
        "journal.Writer(Path(sys.argv[1])).append('start', **journal.process())\n"
        "journal.Writer(Path(sys.argv[1])).append('pending', rollout_id=4, path='4.pt')\n"
    )
    environment = {**os.environ, "SLIME_INSTRUMENT": "0"}
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], check=True, env=environment, cwd=Path(__file__).parents[2]
    )
    found = read_journal(tmp_path)
    assert (found.running, found.healthy) == (False, False)
    assert "rollout 4 was being written when the process ended: 4.pt" in str(found)


def test_another_process_with_the_same_id_is_not_the_one_that_wrote(tmp_path: Path) -> None:
    start(tmp_path, pid_started=1)
    assert read_journal(tmp_path).running is False


def test_a_process_of_another_machine_cannot_be_seen(tmp_path: Path) -> None:
    start(tmp_path, host="elsewhere.invalid")
    assert read_journal(tmp_path).running is None
    assert "cannot be seen from this machine" in str(read_journal(tmp_path))


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    def write(writer: int) -> None:
        for number in range(50):
            Writer(tmp_path).append("written", rollout_id=number, path=f"{writer}-{number}.pt", bytes=1, note="x" * 500)

    threads = [threading.Thread(target=write, args=(writer,)) for writer in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = read_journal(tmp_path)
    assert (len(found.rollouts), found.problems) == (200, [])


def test_a_writer_that_sees_half_of_anothers_line_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pread", lambda *_: b"{")
        Writer(tmp_path).append("written", rollout_id=7, path="7.pt", bytes=5)
    found = read_journal(tmp_path)
    assert (states(tmp_path), found.problems) == ([(7, "written")], [])


def test_values_that_are_no_json_are_written_as_text(tmp_path: Path) -> None:
    Writer(tmp_path).append("start", template=Path("x"), odd=object())
    assert read_journal(tmp_path).starts[0]["template"] == "x"


def test_a_pipe_in_the_journals_place_is_an_error_and_nobody_waits_for_its_reader(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(OSError, match="pipe"):
        start(tmp_path)


def test_what_could_not_be_said_when_it_happened_is_said_once_there_is_room(tmp_path: Path) -> None:
    writer = journal.Writer(tmp_path)
    writer.append("written", rollout_id=0, path="0.pt", bytes=1)
    (tmp_path / NAME).rename(tmp_path / "aside")
    (tmp_path / NAME).mkdir()
    for rollout_id in (1, 2):
        with pytest.raises(OSError, match="directory"):
            writer.append("lost", rollout_id=rollout_id, path=f"{rollout_id}.pt", reason="disk full")
    (tmp_path / NAME).rmdir()
    (tmp_path / "aside").rename(tmp_path / NAME)
    writer.append("written", rollout_id=3, path="3.pt", bytes=1)
    writer.append("written", rollout_id=4, path="4.pt", bytes=1)
    assert states(tmp_path) == [(0, "written"), (1, "lost"), (2, "lost"), (3, "written"), (4, "written")]


def test_a_line_that_was_cut_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, write = journal.Writer(tmp_path), os.write
    writer.append("written", rollout_id=0, path="0.pt", bytes=1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:9]))
        with pytest.raises(OSError, match="No space"):
            writer.append("lost", rollout_id=1, path="1.pt", reason="disk full")
    writer.append("written", rollout_id=2, path="2.pt", bytes=1)
    assert states(tmp_path) == [(0, "written"), (1, "lost"), (2, "written")]
    assert len(read_journal(tmp_path).problems) == 1


def test_two_threads_write_each_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, real = Writer(tmp_path), journal._append

    def slow(file: Path, lines: Any) -> None:
        real(file, lines)
        time.sleep(0.001)

    monkeypatch.setattr(journal, "_append", slow)

    def append(thread: int) -> None:
        for number in range(50):
            writer.append("note", text=f"{thread}-{number}")

    threads = [threading.Thread(target=append, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_journal(tmp_path).notes) == sorted(f"{t}-{n}" for t in range(2) for n in range(50))
