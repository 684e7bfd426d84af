"""One file is written at a time, off the training thread, and none is forgotten."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from slime_instrument._dump.background import BackgroundWriter
from slime_instrument._errors import DumpError
from slime_instrument._patching.failures import FailurePolicy

WAIT = 20.0


class Reports:
    def __init__(self) -> None:
        self.seen: list[tuple[str, BaseException, str, bool]] = []

    def __call__(self, where: str, error: BaseException, lost: str, *, may_raise: bool = True) -> None:
        self.seen.append((where, error, lost, may_raise))


@pytest.fixture
def reports() -> Reports:
    return Reports()


def test_the_caller_goes_on_while_the_work_is_done(reports: Reports) -> None:
    writer, may_end, ended = BackgroundWriter(reports), threading.Event(), []
    writer.submit(lambda: (may_end.wait(WAIT), ended.append(threading.current_thread()))[1], "")
    assert writer.pending
    assert not ended
    may_end.set()
    writer.flush()
    assert ended != [threading.current_thread()]
    assert not writer.pending
    assert reports.seen == []


def test_a_second_piece_of_work_waits_for_the_first(reports: Reports) -> None:
    writer, order, may_end = BackgroundWriter(reports), [], threading.Event()
    writer.submit(lambda: (may_end.wait(WAIT), order.append("first"))[1], "")
    threading.Timer(0.05, may_end.set).start()
    writer.submit(lambda: order.append("second"), "")
    assert order[0] == "first"
    writer.flush()
    assert order == ["first", "second"]


def test_what_went_wrong_is_reported_once_to_whoever_comes_next(reports: Reports) -> None:
    writer, error = BackgroundWriter(reports), DumpError("disk full")

    def fail() -> None:
        raise error

    writer.submit(fail, "Rollout 3 has no train dump.")
    done: list[int] = []
    writer.submit(lambda: done.append(1), "Rollout 4 has no train dump.")
    writer.flush()
    writer.flush()
    assert reports.seen == [("asynchronous writing", error, "Rollout 3 has no train dump.", True)]
    assert done == [1]


def test_strict_raises_it_and_the_next_work_can_be_given_again() -> None:
    writer = BackgroundWriter(FailurePolicy(strict=lambda: True).report)

    def fail() -> None:
        raise DumpError("disk full")

    writer.submit(fail, "")
    with pytest.raises(DumpError, match="disk full"):
        writer.submit(lambda: None, "")
    done: list[int] = []
    writer.submit(lambda: done.append(1), "")
    writer.flush()
    assert done == [1]


def test_lenient_logs_it_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    writer = BackgroundWriter(FailurePolicy(strict=lambda: False).report)

    def fail() -> None:
        raise DumpError("disk full")

    writer.submit(fail, "Rollout 3 has no train dump.")
    writer.flush()
    assert "disk full. Rollout 3 has no train dump. Training goes on." in caplog.text


def test_work_that_can_have_no_thread_is_done_at_once(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    writer, done = BackgroundWriter(reports), []
    writer.submit(lambda: done.append(threading.current_thread()), "")
    assert done == [threading.current_thread()]


def test_sigterm_is_held_only_while_a_file_is_pending(reports: Reports) -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        writer = BackgroundWriter(reports)
        writer.submit(lambda: None, "")
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        writer.flush()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_somebody_elses_sigterm_handler_is_left_alone(reports: Reports) -> None:
    def theirs(*_: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, theirs)
    try:
        writer = BackgroundWriter(reports)
        writer.submit(lambda: None, "")
        assert signal.getsignal(signal.SIGTERM) is theirs
        writer.flush()
        assert signal.getsignal(signal.SIGTERM) is theirs
    finally:
        signal.signal(signal.SIGTERM, before)


def run_process(tmp_path: Path, ending: str, work: str = "slow") -> tuple[subprocess.CompletedProcess[str], Path]:
    """A process that ends in some way while a slow write is pending."""
    file = tmp_path / "0.pt"
    script = textwrap.dedent(
        f"""
        import multiprocessing, os, signal, sys, time
        from pathlib import Path
        from slime_instrument._dump.atomic import write_atomically
        from slime_instrument._dump.background import BackgroundWriter
        from slime_instrument._patching.failures import FailurePolicy

        def slow():
            def write(file):
                time.sleep(0.4)
                file.write(b"whole")
            write_atomically(Path({str(file)!r}), write)

        def failing():
            time.sleep(0.2)
            raise OSError("disk full")

        def main():
            writer = BackgroundWriter(FailurePolicy(strict=lambda: True).report)
            writer.submit({work}, "Rollout 0 has no train dump.")
            {ending}

        main()
        """
    )
    environment = {**os.environ, "SLIME_INSTRUMENT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    return done, file


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('training failed')", 1),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", -signal.SIGINT),
    ],
    ids=["end of the program", "sys.exit", "an exception", "SIGTERM", "SIGINT"],
)
def test_a_pending_file_is_whole_when_the_process_ends_by(ending: str, status: int, tmp_path: Path) -> None:
    done, file = run_process(tmp_path, ending)
    assert file.read_bytes() == b"whole"
    assert done.returncode == status
    assert list(tmp_path.iterdir()) == [file]


def test_sigterm_of_a_handler_that_exits_as_rays_does_waits_too(tmp_path: Path) -> None:
    done, file = run_process(
        tmp_path,
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)",
    )
    assert file.read_bytes() == b"whole"
    assert done.returncode == 7


def test_a_forked_child_that_ends_finishes_its_own_file(tmp_path: Path) -> None:
    _, file = run_process(tmp_path, "pass")
    file.unlink()
    child = (
        "multiprocessing.get_context('fork').Process(target=lambda: (BackgroundWriter(print).submit(slow, ''), None))"
    )
    done, file = run_process(tmp_path, f"writer.flush(); os.unlink({str(file)!r}); p = {child}; p.start(); p.join()")
    assert done.returncode == 0
    assert file.read_bytes() == b"whole"


def test_a_failure_at_exit_is_said_and_does_not_change_how_the_process_ends(tmp_path: Path) -> None:
    done, file = run_process(tmp_path, "pass", work="failing")
    assert done.returncode == 0
    assert "disk full. Rollout 0 has no train dump." in done.stderr
    assert not file.exists()
