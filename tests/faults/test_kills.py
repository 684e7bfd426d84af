"""A few of the two hundred kills that ``python -m tests.faults.kills`` makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.kills import kill_writers

# torch has threads of its own by now; the child only writes and is killed.
pytestmark = pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")


def test_a_killed_writer_never_leaves_a_torn_dump_or_a_stray_file(tmp_path: Path) -> None:
    tally = kill_writers(tmp_path, 12)
    assert tally.kills == 12
    assert (tally.torn, tally.strays) == (0, 0)
    assert tally.while_writing > 0, "no kill hit a write: this proves nothing"
