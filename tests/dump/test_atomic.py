"""A file is there whole or not at all, whatever happens to the disk or to the process."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from slime_instrument._dump.atomic import clean_leftovers, write_atomically
from slime_instrument._errors import DumpError

OLD = b"the old dump"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "0.pt").write_bytes(OLD)
    return tmp_path / "0.pt"


def put(data: bytes) -> Any:
    return lambda file: file.write(data)


def test_a_file_is_replaced_and_its_size_returned(path: Path) -> None:
    assert write_atomically(path, put(b"new")) == 3
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["0.pt"]


def test_missing_folders_are_made(tmp_path: Path) -> None:
    write_atomically(tmp_path / "a" / "b" / "0.pt", put(b"x"))
    assert (tmp_path / "a" / "b" / "0.pt").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "Disk quota exceeded"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "Input/output error"),
        (RuntimeError("PytorchStreamWriter failed\nwith a trace"), "PytorchStreamWriter failed"),
        (RuntimeError(), "RuntimeError"),
        (OSError(), "OSError"),
    ],
)
def test_a_write_that_fails_leaves_the_old_file_and_says_why_in_one_message(
    path: Path, error: Exception, reason: str
) -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    with pytest.raises(DumpError) as raised:
        write_atomically(path, write)
    assert str(raised.value) == (
        f"slime_instrument: {path}: expected to write the train dump, found {reason}. This rollout has no train dump; "
        "a file that was there before is untouched. Check space, quota and rights of the folder."
    )
    assert raised.value.__cause__ is error
    assert (path.read_bytes(), os.listdir(path.parent)) == (OLD, ["0.pt"])


@pytest.mark.parametrize("error", [ValueError("cannot pickle"), KeyboardInterrupt(), MemoryError()])
def test_what_is_no_disk_error_comes_through_and_leaves_the_old_file(path: Path, error: BaseException) -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, write)
    assert (path.read_bytes(), os.listdir(path.parent)) == (OLD, ["0.pt"])


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_flush_or_rename_that_fails_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(DumpError, match="Input/output error"):
            write_atomically(path, put(b"new"))
    assert (path.read_bytes(), os.listdir(path.parent)) == (OLD, ["0.pt"])


def test_a_file_system_that_cannot_flush_folders_is_fine(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def fail_on_folders(name: Any, *more: Any) -> int:
        if os.path.isdir(name):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, *more)

    monkeypatch.setattr(os, "open", fail_on_folders)
    write_atomically(path, put(b"new"))
    assert path.read_bytes() == b"new"


def test_a_folder_in_the_files_place_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "0.pt").mkdir()
    with pytest.raises(DumpError, match="found a folder stands in its place"):
        write_atomically(tmp_path / "0.pt", put(b"x"))
    assert os.listdir(tmp_path) == ["0.pt"]


def test_a_file_in_the_folders_place_is_one_clear_message(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("x")
    with pytest.raises(DumpError, match=r"found (File exists|Not a directory)"):
        write_atomically(tmp_path / "folder" / "0.pt", put(b"x"))


def test_a_folder_deleted_while_writing_is_one_clear_message(tmp_path: Path) -> None:
    folder = tmp_path / "gone"

    def write(file: BinaryIO) -> None:
        file.write(b"x")
        shutil.rmtree(folder)

    with pytest.raises(DumpError, match="No such file or directory"):
        write_atomically(folder / "0.pt", write)
    assert not folder.exists()


def test_a_long_name_is_written_and_one_that_is_too_long_is_one_clear_message(tmp_path: Path) -> None:
    name = "x" * 252 + ".pt"
    write_atomically(tmp_path / name, put(b"x"))
    assert os.listdir(tmp_path) == [name]
    with pytest.raises(DumpError, match="File name too long"):
        write_atomically(tmp_path / ("y" * 300), put(b"x"))
    assert os.listdir(tmp_path) == [name]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_one_clear_message(path: Path) -> None:
    path.parent.chmod(0o500)
    try:
        with pytest.raises(DumpError, match="Permission denied"):
            write_atomically(path, put(b"new"))
    finally:
        path.parent.chmod(0o700)
    assert path.read_bytes() == OLD


def test_a_file_system_that_takes_no_files_is_one_clear_message() -> None:
    with pytest.raises(DumpError, match="expected to write the train dump, found "):
        write_atomically(Path("/proc/self/0.pt"), put(b"x"))


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB, where this machine lets us mount one."""
    mount = shutil.which("mount")
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if mount is None or subprocess.run([mount, *options], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets nobody mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_real_full_disk_leaves_the_old_dump_and_says_so(tiny_disk: Path) -> None:
    path = tiny_disk / "0.pt"
    small, large = {"x": torch.zeros(1000)}, {"x": torch.zeros(1_000_000)}
    write_atomically(path, lambda file: torch.save(small, file))
    with pytest.raises(DumpError, match="found No space left on device"):
        write_atomically(path, lambda file: torch.save(large, file))
    assert torch.load(path, weights_only=True)["x"].numel() == 1000
    assert os.listdir(tiny_disk) == ["0.pt"]


def test_a_real_read_only_disk_leaves_the_old_dump_and_says_so(tiny_disk: Path) -> None:
    path = tiny_disk / "0.pt"
    path.write_bytes(OLD)
    part = leftover(tiny_disk, socket.gethostname(), dead_pid())
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(DumpError, match="found Read-only file system"):
        write_atomically(path, put(b"new"))
    assert clean_leftovers(tiny_disk) == []
    assert (path.read_bytes(), part.exists()) == (OLD, True)


def test_a_real_limit_on_file_size_leaves_the_old_dump_and_says_so(path: Path) -> None:
    torch.save({"x": torch.zeros(1000)}, path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DumpError, match="found File too large"):
            write_atomically(path, lambda file: torch.save({"x": torch.zeros(1_000_000)}, file))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old_handler)
    assert (path.read_bytes(), os.listdir(path.parent)) == (before, ["0.pt"])


# ---------------------------------------------------------------- leftovers


def leftover(folder: Path, host: str, pid: int | str, name: str = "0.pt") -> Path:
    part = folder / f".{name}.slime_instrument-{host}-{pid}.part"
    part.write_bytes(b"half")
    return part


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def test_only_parts_of_this_machines_dead_processes_are_removed(tmp_path: Path) -> None:
    here = socket.gethostname()
    dead = [leftover(tmp_path, here, dead_pid()), leftover(tmp_path, here, dead_pid(), "a-b.c-1.pt")]
    impossible = leftover(tmp_path, here, "9" * 30)
    kept = [
        leftover(tmp_path, here, os.getpid()),
        leftover(tmp_path, here, 1),
        leftover(tmp_path, "other-" + here, dead_pid()),
        tmp_path / "0.pt",
        tmp_path / ".0.pt.part",
        tmp_path / f".0.pt.slime_instrument-{here}-x.part",
        tmp_path / f"0.pt.slime_instrument-{here}-{dead_pid()}.part",
    ]
    for path in kept[3:]:
        path.write_bytes(b"x")
    assert sorted(clean_leftovers(tmp_path)) == sorted([*dead, impossible])
    assert sorted(tmp_path.iterdir()) == sorted(kept)


def test_a_leftover_that_cannot_be_removed_does_not_cost_the_dump(tmp_path: Path) -> None:
    (tmp_path / f".0.pt.slime_instrument-{socket.gethostname()}-{dead_pid()}.part").mkdir()
    removable = leftover(tmp_path, socket.gethostname(), dead_pid(), "1.pt")
    assert clean_leftovers(tmp_path) == [removable]


def test_a_folder_that_is_not_there_has_no_leftovers(tmp_path: Path) -> None:
    assert clean_leftovers(tmp_path / "nowhere") == []


WRITER = """
import sys, time
from pathlib import Path
from slime_instrument._dump.atomic import write_atomically
path = Path(sys.argv[1])
print("ready", flush=True)
number = 0
while True:
    number += 1
    def write(file):
        for _ in range(40):
            file.write(bytes([number % 256]) * 4096)
    write_atomically(path, write)
"""


def test_killed_at_any_moment_the_file_in_place_is_always_a_whole_one(path: Path) -> None:
    path.write_bytes(bytes(40 * 4096))
    chance = random.Random(5)
    leftovers = 0
    seen = {0}
    environment = {**os.environ, "SLIME_INSTRUMENT": "0"}
    for _ in range(30):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)],
            stdout=subprocess.PIPE,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0.0, 0.03))
        process.kill()
        process.wait()
        process.stdout.close()
        data = path.read_bytes()
        assert len(data) == 40 * 4096
        assert len(set(data)) == 1
        seen.add(data[0])
        leftovers += len(clean_leftovers(path.parent))
        assert os.listdir(path.parent) == ["0.pt"]

    assert len(seen) > 1  # it did write
    assert leftovers > 0  # and was killed while it did
