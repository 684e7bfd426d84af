"""The file of a dump: its path, whole or not at all whatever happens to the disk or the process, written as slime would
where no plain file stands; in the background; and rotation."""

from __future__ import annotations

import errno
import functools
import gc
import io
import os
import random
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
import weakref
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch

from slime_instrument._dump import file as file_module
from slime_instrument._dump.file import (
    BackgroundWriter,
    Disk,
    Pickler,
    Rotation,
    check_template,
    check_writable,
    clean_leftovers,
    dump_folder,
    dump_path,
    dump_template,
    write_dump,
)
from slime_instrument._errors import DumpError, TrainingPathError
from slime_instrument._patching.failures import FailurePolicy
from slime_instrument._settings import Pins, Settings, is_due

ROOT = Path(__file__).parents[2]
OLD = b"the old dump"


class Told(list):  # type: ignore[type-arg]
    """What the disk said."""

    def __call__(self, text: str) -> None:
        self.append(text)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def disk(told: Told) -> Disk:
    return Disk(told)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "0.pt").write_bytes(OLD)
    return tmp_path / "0.pt"


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_module, "_RETRY_AFTER_S", 0.0)


def put(data: bytes) -> Callable[[IO[bytes]], Any]:
    return lambda file: file.write(data)


def payload(size: int = 10, **more: Any) -> dict[str, Any]:
    shard = {"rank": 0, "provenance": {}}
    return {"format_version": 2, "samples": [{"x": torch.zeros(size), **more}], "dp_shards": [shard]}


def failing(code: int) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


# ---------------------------------------------------------------------------------------------------------------------
# The path


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


@pytest.mark.parametrize(
    ("template", "folder"),
    [
        ("d/{rollout_id}.pt", "d"),
        ("{rollout_id}.pt", "."),
        ("/a/b/{rollout_id}/{rollout_id}.pt", "/a/b"),
        ("a/r{rank}/{rollout_id:03d}/x.pt", "a/r3"),
    ],
)
def test_the_folder_of_all_dumps_is_the_part_of_the_path_that_names_no_rollout(template: str, folder: str) -> None:
    assert dump_folder(template, 3) == Path(folder)


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
    "rank alone": ("{rank}.pt", "a different file for each rollout", "a path without {rollout_id}, for several"),
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


def test_a_path_without_rollout_id_is_fine_for_a_device() -> None:
    assert check_template(args("/dev/null")) == "/dev/null"


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


# ---------------------------------------------------------------------------------------------------------------------
# The check at start


def test_the_folder_is_made_and_left_empty(tmp_path: Path, disk: Disk) -> None:
    check_writable(str(tmp_path / "a" / "{rollout_id}.pt"), 0, disk)
    assert list((tmp_path / "a").iterdir()) == []


@pytest.mark.parametrize("kind", ["a file in the folder's place", "below a file", "no such place"])
@pytest.mark.usefixtures("no_pause")
def test_a_folder_that_takes_no_files_is_refused(tmp_path: Path, kind: str, disk: Disk) -> None:
    (tmp_path / "f").write_text("x")
    folder = {"a file in the folder's place": tmp_path / "f", "below a file": tmp_path / "f" / "g"}.get(
        kind, Path("/proc/self")
    )
    with pytest.raises(TrainingPathError, match=r"in which files can be made, found [A-Z]") as raised:
        check_writable(str(folder / "{rollout_id}.pt"), 0, disk)
    assert f"expected a folder {folder}" in str(raised.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(tmp_path: Path, disk: Disk) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(TrainingPathError, match="Permission denied"):
            check_writable(str(tmp_path / "{rollout_id}.pt"), 0, disk)
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.ESTALE])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_the_check_does_what_a_dump_does_so_that_what_fails_later_fails_now(
    tmp_path: Path, no_pause: None, monkeypatch: pytest.MonkeyPatch, call: str, code: int, disk: Disk
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(code))
        with pytest.raises(TrainingPathError) as raised:
            check_writable(str(tmp_path / "{rollout_id}.pt"), 0, disk)
    assert os.strerror(code) in str(raised.value)
    assert "MB free" in str(raised.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_at_start_is_said_and_may_have_room_later(
    tmp_path: Path, no_pause: None, monkeypatch: pytest.MonkeyPatch, code: int, disk: Disk, told: Told
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing(code))
        check_writable(str(tmp_path / "{rollout_id}.pt"), 0, disk)
    (text,) = told
    assert os.strerror(code) in text
    assert "MB free" in text
    disk.write(tmp_path / "0.pt", put(b"new"))
    assert (tmp_path / "0.pt").read_bytes() == b"new"


def test_what_the_folder_merely_lacks_is_found_at_start_and_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, told: Told
) -> None:
    monkeypatch.setattr(os, "replace", failing(errno.ENOSYS))
    monkeypatch.setattr(os, "fsync", failing(errno.EOPNOTSUPP))
    check_writable(str(tmp_path / "{rollout_id}.pt"), 0, disk)
    assert list(tmp_path.iterdir()) == []
    assert len(told) == 2
    disk.write(tmp_path / "0.pt", put(b"new"))
    assert (tmp_path / "0.pt").read_bytes() == b"new"
    assert len(told) == 2


# ---------------------------------------------------------------------------------------------------------------------
# Whole or not at all


def test_a_file_is_replaced_and_its_size_returned(path: Path, disk: Disk) -> None:
    assert disk.write(path, put(b"new")) == 3
    assert path.read_bytes() == b"new"
    assert os.listdir(path.parent) == ["0.pt"]


def test_missing_folders_are_made(tmp_path: Path, disk: Disk) -> None:
    disk.write(tmp_path / "a" / "b" / "0.pt", put(b"x"))
    assert (tmp_path / "a" / "b" / "0.pt").read_bytes() == b"x"


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "full"), ValueError("cannot pickle"), KeyboardInterrupt(), MemoryError()]
)
def test_whatever_fails_while_the_file_is_filled_the_old_one_stays(
    path: Path, error: BaseException, disk: Disk
) -> None:
    def fill(file: IO[bytes]) -> None:
        file.write(b"half")
        raise error

    with pytest.raises(type(error)):
        disk.write(path, fill)
    assert (path.read_bytes(), os.listdir(path.parent)) == (OLD, ["0.pt"])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT, errno.ESTALE])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_flush_or_rename_that_fails_leaves_the_old_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, disk: Disk
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, call, failing(code))
        with pytest.raises(OSError, match=os.strerror(code)):
            disk.write(path, put(b"new"))
    assert (path.read_bytes(), os.listdir(path.parent)) == (OLD, ["0.pt"])
    disk.write(path, put(b"new"))  # a failing write costs nothing after it
    assert path.read_bytes() == b"new"


class Closing:
    """A file whose ``call`` fails, like one on a mount that reports at the end what it could not keep."""

    def __init__(self, file: IO[bytes], call: str) -> None:
        self._file, self._call = file, call

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            return failing(errno.EDQUOT)
        return getattr(self._file, name)

    def __enter__(self) -> Closing:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._call == "close":
            failing(errno.EDQUOT)()


@pytest.mark.parametrize("call", ["write", "flush", "close"])
def test_a_file_that_fails_at_any_call_leaves_the_old_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, call: str, disk: Disk
) -> None:
    real = Disk._make_part
    monkeypatch.setattr(Disk, "_make_part", lambda self, place: Closing(real(self, place), call))
    with pytest.raises(OSError, match="Disk quota exceeded"):
        disk.write(path, put(b"new"))
    assert (path.read_bytes(), os.listdir(path.parent)) == (OLD, ["0.pt"])


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_flush_is_said_once_and_written_all_the_same(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int, disk: Disk, told: Told
) -> None:
    monkeypatch.setattr(os, "fsync", failing(code))
    for data in (b"one", b"two"):
        disk.write(path, put(data))
        assert path.read_bytes() == data
    assert len(told) == 1
    assert "cannot flush files to disk" in told[0]


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EXDEV])
def test_a_file_system_that_cannot_rename_is_said_once_and_files_are_written_in_place(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int, disk: Disk, told: Told
) -> None:
    monkeypatch.setattr(os, "replace", failing(code))
    for data in (b"one", b"two"):
        assert disk.write(path, put(data)) == 3
        assert path.read_bytes() == data
        assert os.listdir(path.parent) == ["0.pt"]
    assert len(told) == 1
    assert "cannot rename files" in told[0]
    assert disk.can_rename is False


def test_a_file_system_that_cannot_flush_folders_is_fine(
    path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    real = os.open

    def fail_on_folders(name: Any, *more: Any) -> int:
        if os.path.isdir(name):
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(name, *more)

    monkeypatch.setattr(os, "open", fail_on_folders)
    disk.write(path, put(b"new"))
    assert path.read_bytes() == b"new"


def test_a_folder_in_the_files_place_stays(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "0.pt").mkdir()
    with pytest.raises(IsADirectoryError):
        disk.write(tmp_path / "0.pt", put(b"x"))
    assert os.listdir(tmp_path) == ["0.pt"]


def test_a_folder_deleted_while_writing_is_an_error_and_nothing_is_left(tmp_path: Path, disk: Disk) -> None:
    folder = tmp_path / "gone"

    def fill(file: IO[bytes]) -> None:
        file.write(b"x")
        shutil.rmtree(folder)

    with pytest.raises(OSError, match="No such file or directory"):
        disk.write(folder / "0.pt", fill)
    assert not folder.exists()


def test_a_long_name_is_written_and_one_that_is_too_long_is_an_error(tmp_path: Path, disk: Disk) -> None:
    name = "x" * 252 + ".pt"
    disk.write(tmp_path / name, put(b"x"))
    with pytest.raises(OSError, match="File name too long"):
        disk.write(tmp_path / ("y" * 300), put(b"x"))
    assert os.listdir(tmp_path) == [name]


# ---------------------------------------------------------------------------------------------------------------------
# What stands at the path


def test_a_device_stays_a_device(tmp_path: Path, disk: Disk) -> None:
    device = tmp_path / "0.pt"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        device.write_bytes(b"x")
    except OSError:
        device = Path("/dev/null")
    before = os.stat(device)
    write_dump(payload(), device, disk)
    check_writable(str(device), 0, disk)
    after = os.stat(device)
    assert stat.S_ISCHR(after.st_mode)
    assert (before.st_ino, before.st_mode, before.st_rdev) == (after.st_ino, after.st_mode, after.st_rdev)


def test_a_full_device_is_one_clear_message_and_stays(no_pause: None, disk: Disk) -> None:
    with pytest.raises(DumpError, match="No space left on device"):
        write_dump(payload(100_000), Path("/dev/full"), disk)
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_pipe_is_written_through_and_its_reader_gets_the_dump(tmp_path: Path, disk: Disk) -> None:
    pipe = tmp_path / "0.pt"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_dump(payload(1000), pipe, disk)
    reader.join(20)
    assert torch.load(io.BytesIO(read[0]), weights_only=True)["samples"][0]["x"].numel() == 1000
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("relative", [False, True])
def test_a_link_stays_a_link_and_its_target_is_written(
    tmp_path: Path, dangling: bool, relative: bool, disk: Disk
) -> None:
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "real.pt"
    if not dangling:
        target.write_bytes(OLD)
    link = tmp_path / "0.pt"
    link.symlink_to("elsewhere/real.pt" if relative else target)
    disk.write(link, put(b"new"))
    assert link.is_symlink()
    assert target.read_bytes() == link.read_bytes() == b"new"
    assert os.listdir(tmp_path / "elsewhere") == ["real.pt"]


def test_a_link_to_itself_is_an_error(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "0.pt").symlink_to("0.pt")
    with pytest.raises(OSError):  # noqa: PT011  # which one is the system's choice
        disk.write(tmp_path / "0.pt", put(b"new"))
    assert (tmp_path / "0.pt").is_symlink()


def test_folders_that_are_links_are_fine(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    disk.write(tmp_path / "link" / "more" / "0.pt", put(b"new"))
    assert (tmp_path / "real" / "more" / "0.pt").read_bytes() == b"new"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o664, 0o606])
def test_the_mode_of_an_existing_file_stays(path: Path, mode: int, disk: Disk) -> None:
    path.chmod(mode)
    disk.write(path, put(b"new"))
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path, disk: Disk) -> None:
    before = os.umask(0o027)
    try:
        disk.write(tmp_path / "0.pt", put(b"new"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "0.pt").stat().st_mode) == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_of_an_existing_file_stays(path: Path, disk: Disk) -> None:
    os.chown(path, 1234, 2345)
    path.chmod(0o640)
    disk.write(path, put(b"new"))
    after = path.stat()
    assert (after.st_uid, after.st_gid, stat.S_IMODE(after.st_mode)) == (1234, 2345, 0o640)


# ---------------------------------------------------------------------------------------------------------------------
# Real disks


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


def test_a_real_full_disk_leaves_the_old_dump_and_says_so(tiny_disk: Path, no_pause: None, disk: Disk) -> None:
    path = tiny_disk / "0.pt"
    write_dump(payload(1000), path, disk)
    for _ in range(4):  # however often in a row
        with pytest.raises(DumpError, match=r"found No space left on device \(tried twice; \d MB free\)"):
            write_dump(payload(1_000_000), path, disk)
        assert os.listdir(tiny_disk) == ["0.pt"]
    assert torch.load(path, weights_only=True)["samples"][0]["x"].numel() == 1000
    write_dump(payload(2000), path, disk)
    assert torch.load(path, weights_only=True)["samples"][0]["x"].numel() == 2000


def test_a_real_read_only_disk_leaves_the_old_dump_and_says_so(tiny_disk: Path, no_pause: None, disk: Disk) -> None:
    path = tiny_disk / "0.pt"
    path.write_bytes(OLD)
    part = leftover(tiny_disk, socket.gethostname(), dead_pid())
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(DumpError, match="found Read-only file system"):
        write_dump(payload(), path, disk)
    assert clean_leftovers(tiny_disk) == []
    assert (path.read_bytes(), part.exists()) == (OLD, True)


def test_a_real_file_in_place_of_a_mount_cannot_be_renamed_over_and_is_written_in_place(
    tmp_path: Path, disk: Disk, told: Told
) -> None:
    """A file that is itself a mount, as containers have them: renaming over it is EBUSY."""
    target, source = tmp_path / "0.pt", tmp_path / "source"
    target.write_bytes(OLD)
    source.write_bytes(OLD)
    command = ["mount", "--bind", str(source), str(target)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine lets nobody bind a file")
    try:
        disk.write(target, put(b"new"))
        assert source.read_bytes() == b"new"
    finally:
        subprocess.run(["umount", str(target)], check=True)


def test_a_real_limit_on_file_size_leaves_the_old_dump_and_says_so(path: Path, no_pause: None, disk: Disk) -> None:
    write_dump(payload(1000), path, disk)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old_handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(DumpError, match="found File too large"):
            write_dump(payload(1_000_000), path, disk)
        assert (path.read_bytes(), os.listdir(path.parent)) == (before, ["0.pt"])
        write_dump(payload(2000), path, disk)  # one that fits
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old_handler)
    assert torch.load(path, weights_only=True)["samples"][0]["x"].numel() == 2000


# ---------------------------------------------------------------------------------------------------------------------
# The dump in its file


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.ESTALE])
def test_a_write_that_is_refused_is_tried_once_more_after_a_pause(
    path: Path, monkeypatch: pytest.MonkeyPatch, times: int, code: int, disk: Disk
) -> None:
    pauses: list[float] = []
    left = [times]
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if left[0] and stat.S_ISREG(os.fstat(descriptor).st_mode):
            left[0] -= 1
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(file_module.time, "sleep", pauses.append)
    if times == 1:
        write_dump(payload(), path, disk)
        assert torch.load(path, weights_only=True)["format_version"] == 2
    else:
        with pytest.raises(DumpError) as raised:
            write_dump(payload(), path, disk)
        message = str(raised.value)
        assert message.startswith(
            f"slime_instrument: {path}: expected to write the train dump, found {os.strerror(code)}"
        )
        assert "tried twice" in message
        assert "MB free" in message
        assert isinstance(raised.value.__cause__, OSError)
        assert path.read_bytes() == OLD
    assert len(pauses) == 1
    assert 0 < pauses[0] <= 5
    assert os.listdir(path.parent) == ["0.pt"]


class CannotBeSaved:
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def test_a_field_that_torch_cannot_save_is_left_out_and_named(path: Path, disk: Disk) -> None:
    given = payload(odd=CannotBeSaved())
    given["top"] = CannotBeSaved()
    given["dp_shards"][0]["layout"] = CannotBeSaved()
    write_dump(given, path, disk)
    found = torch.load(path, weights_only=True)
    assert found["dp_shards"][0]["provenance"]["left_out"].keys() == {"odd", "top", "layout"}
    assert "not this one" in found["dp_shards"][0]["provenance"]["left_out"]["odd"]
    assert found["samples"][0]["x"].tolist() == [0.0] * 10
    assert "top" not in found


@pytest.mark.parametrize("name", ["int4", "uint4", "uint1"])
def test_a_dtype_that_torch_cannot_save_costs_its_field(path: Path, name: str, disk: Disk) -> None:
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    write_dump(payload(odd=torch.zeros(4, dtype=torch.uint8).view(dtype)), path, disk)
    found = torch.load(path, weights_only=True)
    left_out = found["dp_shards"][0]["provenance"].get("left_out", {})
    assert ("odd" in found["samples"][0]) != ("odd" in left_out)
    assert "x" in found["samples"][0]


def saved(value: Any) -> Any:
    file = io.BytesIO()
    file_module._save_fast(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool),
    *(torch.complex64, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit_from_the_faster_pickler(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0, 1]).to(torch.float32).to(dtype)
    back = saved([tensor])[0]
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))


def test_shapes_strides_and_empty_tensors_come_back() -> None:
    tensors = [
        *(torch.arange(12).view(3, 4).t(), torch.arange(10)[2:9:3], torch.empty(0), torch.empty(0, 4)),
        *(torch.tensor(2.5), torch.ones(1).expand(5)),
    ]
    for one, other in zip(saved(tensors), tensors, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one, other)


def test_views_of_one_tensor_share_one_storage_in_the_file() -> None:
    flat, other = torch.arange(1000.0), torch.arange(50)
    file = io.BytesIO()
    file_module._save_fast({"samples": [{"a": view} for view in flat.split(10)], "b": other}, file)
    with zipfile.ZipFile(file) as archive:
        sizes = [info.file_size for info in archive.infolist() if "/data/" in info.filename]
        assert archive.testzip() is None  # checksums as torch writes them
    assert sorted(sizes) == [400, 4000]


def test_plain_objects_come_back_as_they_are() -> None:
    given = {"a": [1, None, 2.5, True, "x", (1, "y")], "b": {"c": {}}, 3: b"bytes", "s": {1, 2}}
    assert saved(given) == given


def test_a_tensor_that_is_not_plain_is_left_to_torch() -> None:
    assert saved([torch.ones(3, requires_grad=True)])[0].requires_grad
    conjugate = torch.tensor([1 + 2j]).conj()
    assert torch.equal(saved([conjugate])[0], conjugate)


def test_torch_asks_for_few_storages_and_for_no_other_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for the faster pickler: a call of torch's own function per object is two thirds of the time."""
    asked: list[Any] = []
    original = Pickler.__init_subclass__.__func__  # type: ignore[attr-defined]

    def counting(cls: Any) -> None:
        theirs = cls.persistent_id
        cls.persistent_id = lambda self, value: asked.append(value) or theirs(self, value)
        original(cls)

    monkeypatch.setattr(Pickler, "__init_subclass__", classmethod(counting))
    flats = [torch.arange(1000.0), torch.arange(1000)]
    saved([{"a": a, "b": b} for a, b in zip(flats[0].split(10), flats[1].split(10), strict=True)])
    assert len(asked) == len(flats)


# ---------------------------------------------------------------------------------------------------------------------
# Leftovers


def leftover(folder: Path, host: str, pid: int | str, name: str = "0.pt") -> Path:
    part = folder / f".{name}.slime_instrument-{host}-{pid}-0.part"
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


def test_a_leftover_that_somebody_still_writes_stays(tmp_path: Path) -> None:
    """Another container may have this host name and other process ids."""
    import fcntl

    part = leftover(tmp_path, socket.gethostname(), dead_pid())
    with open(part, "rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        assert clean_leftovers(tmp_path) == []
    assert clean_leftovers(tmp_path) == [part]


def test_what_is_no_plain_file_is_no_leftover(tmp_path: Path) -> None:
    here, pid = socket.gethostname(), dead_pid()
    (tmp_path / f".0.pt.slime_instrument-{here}-{pid}-0.part").mkdir()
    (tmp_path / "mine").write_text("x")
    (tmp_path / f".1.pt.slime_instrument-{here}-{pid}-0.part").symlink_to("mine")
    removable = leftover(tmp_path, here, pid, "2.pt")
    assert clean_leftovers(tmp_path) == [removable]
    assert (tmp_path / "mine").read_text() == "x"


def test_a_folder_that_is_not_there_has_no_leftovers(tmp_path: Path) -> None:
    assert clean_leftovers(tmp_path / "nowhere") == []


WRITER = """
import os, sys
from pathlib import Path
from slime_instrument._dump.file import Disk
path, disk = Path(sys.argv[1]), Disk(print)

def write_on(number):
    def write(file):
        for _ in range(40):
            file.write(bytes([number % 256]) * 4096)
    while True:
        number += 1
        disk.write(path, write)

for line in sys.stdin:
    child = os.fork()
    if not child:
        write_on(int(line))
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
"""
"""Forks a process that writes without an end for each line that it reads."""


def test_killed_at_any_moment_the_file_in_place_is_always_a_whole_one(path: Path) -> None:
    path.write_bytes(bytes(40 * 4096))
    chance = random.Random(5)
    leftovers = 0
    seen = {0}
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "SLIME_INSTRUMENT": "0"}, cwd=ROOT,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        for number in range(40):
            print(number, file=process.stdin, flush=True)
            writer = int(process.stdout.readline())
            time.sleep(chance.uniform(0.0, 0.05))
            os.kill(writer, signal.SIGKILL)
            assert process.stdout.readline() == "gone\n"
            data = path.read_bytes()
            assert len(data) == 40 * 4096
            assert len(set(data)) == 1
            seen.add(data[0])
            leftovers += len(clean_leftovers(path.parent))
            assert os.listdir(path.parent) == ["0.pt"]
    assert len(seen) > 1  # it did write
    assert leftovers > 0  # and was killed while it did


# ---------------------------------------------------------------------------------------------------------------------
# In the background

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
    writer, may_end, ended = BackgroundWriter(reports, 5.0), threading.Event(), []
    writer.submit(lambda: (may_end.wait(WAIT), ended.append(threading.current_thread()))[1], "")
    assert writer.pending
    assert not ended
    may_end.set()
    writer.flush()
    assert len(ended) == 1
    assert ended != [threading.current_thread()]
    assert not writer.pending
    assert reports.seen == []


def test_a_second_piece_of_work_waits_for_the_first(reports: Reports) -> None:
    writer, order, may_end = BackgroundWriter(reports, 5.0), [], threading.Event()
    writer.submit(lambda: (may_end.wait(WAIT), order.append("first"))[1], "")
    threading.Timer(0.05, may_end.set).start()
    writer.submit(lambda: order.append("second"), "")
    assert order[0] == "first"
    writer.flush()
    assert order == ["first", "second"]


def fail() -> None:
    raise DumpError("disk full")


def test_what_went_wrong_is_reported_once_to_whoever_comes_next(reports: Reports) -> None:
    writer, error = BackgroundWriter(reports, 5.0), DumpError("disk full")

    def fail_with_it() -> None:
        raise error

    writer.submit(fail_with_it, "Rollout 3 has no train dump.")
    done: list[int] = []
    writer.submit(lambda: done.append(1), "Rollout 4 has no train dump.")
    writer.flush()
    writer.flush()
    assert reports.seen == [("asynchronous writing", error, "Rollout 3 has no train dump.", True)]
    assert done == [1]


def test_strict_raises_it_and_the_next_work_can_be_given_again() -> None:
    writer = BackgroundWriter(FailurePolicy(strict=lambda: True).report, 5.0)
    writer.submit(fail, "")
    with pytest.raises(DumpError, match="disk full"):
        writer.submit(lambda: None, "")
    done: list[int] = []
    writer.submit(lambda: done.append(1), "")
    writer.flush()
    assert done == [1]


def test_lenient_logs_it_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    writer = BackgroundWriter(FailurePolicy(strict=lambda: False).report, 5.0)
    writer.submit(fail, "Rollout 3 has no train dump.")
    writer.flush()
    assert "disk full" in caplog.text
    assert "Rollout 3 has no train dump." in caplog.text


def test_work_that_can_have_no_thread_is_done_at_once(reports: Reports, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    writer, done = BackgroundWriter(reports, 5.0), []
    writer.submit(lambda: done.append(threading.current_thread()), "")
    assert done == [threading.current_thread()]


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None])
def test_signal_handlers_are_left_alone_while_a_file_is_pending(reports: Reports, handler: Any) -> None:
    before = signal.signal(signal.SIGTERM, handler)
    try:
        writer, may_end = BackgroundWriter(reports, 5.0), threading.Event()
        writer.submit(lambda: may_end.wait(WAIT), "")  # type: ignore[arg-type,return-value]
        assert signal.getsignal(signal.SIGTERM) is handler
        may_end.set()
        writer.flush()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def run_process(tmp_path: Path, ending: str, work: str = "slow") -> tuple[subprocess.CompletedProcess[str], Path]:
    """A process that ends in some way while a slow write is pending."""
    file = tmp_path / "0.pt"
    script = textwrap.dedent(
        f"""
        import multiprocessing, os, signal, sys, time
        from pathlib import Path
        from slime_instrument._dump import file as file_module
        from slime_instrument._dump.file import BackgroundWriter, Disk
        from slime_instrument._patching.failures import FailurePolicy

        disk = Disk(print)
        file_module._AT_EXIT_S = 0.0

        def slow():
            def write(file):
                for _ in range(8):
                    time.sleep(0.1)
                    disk.writes += 1
                file.write(b"whole")
            disk.write(Path({str(file)!r}), write)

        def stuck():
            time.sleep(60)

        def failing():
            time.sleep(0.2)
            raise OSError("disk full")

        def main():
            writer = BackgroundWriter(FailurePolicy(strict=lambda: True).report, 0.4)
            writer.submit({work}, "Rollout 0 has no train dump.", lambda: disk.writes)
            {ending}

        main()
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "SLIME_INSTRUMENT": "0"}, cwd=ROOT,
    )  # fmt: skip
    return done, file


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise ValueError('training failed')", 1),
        ("os.kill(os.getpid(), signal.SIGINT); time.sleep(30)", -signal.SIGINT),
        ("signal.signal(15, lambda *_: sys.exit(7)); os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", 7),
    ],
    ids=["end of the program", "sys.exit", "an exception", "SIGINT", "a handler that exits, as Ray's does"],
)
def test_a_pending_file_is_whole_when_the_process_ends_by(ending: str, status: int, tmp_path: Path) -> None:
    """It takes twice the bound on standing still, and grows all the while."""
    done, file = run_process(tmp_path, ending)
    assert file.read_bytes() == b"whole"
    assert done.returncode == status
    assert list(tmp_path.iterdir()) == [file]


def test_sigterm_ends_the_process_as_without_us_and_leaves_no_half_file(tmp_path: Path) -> None:
    began = time.monotonic()
    done, file = run_process(tmp_path, "time.sleep(0.3); os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)")
    assert done.returncode == -signal.SIGTERM
    assert time.monotonic() - began < 25
    assert not file.exists()
    assert all(part.name.endswith(".part") for part in tmp_path.iterdir())
    clean_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_stands_still_at_exit_is_named_and_the_process_ends(tmp_path: Path) -> None:
    done, file = run_process(tmp_path, "pass", work="stuck")
    assert done.returncode == 0
    assert "did not grow for 0.4 s when the process ended" in done.stderr
    assert "Rollout 0 has no train dump." in done.stderr
    assert not file.exists()


def test_a_forked_child_that_ends_finishes_its_own_file(tmp_path: Path) -> None:
    child = (
        "multiprocessing.get_context('fork').Process("
        "target=lambda: (BackgroundWriter(print, 0.4).submit(slow, '', lambda: disk.writes), None))"
    )
    ending = f"writer.flush(); os.unlink({str(tmp_path / '0.pt')!r}); p = {child}; p.start(); p.join()"
    done, file = run_process(tmp_path, ending)
    assert done.returncode == 0, done.stderr
    assert file.read_bytes() == b"whole"


def test_a_failure_at_exit_is_said_and_does_not_change_how_the_process_ends(tmp_path: Path) -> None:
    done, file = run_process(tmp_path, "pass", work="failing")
    assert done.returncode == 0
    assert "disk full" in done.stderr
    assert "Rollout 0 has no train dump." in done.stderr
    assert not file.exists()


# ---------------------------------------------------------------------------------------------------------------------
# Which rollouts are dumped, and which dumps are kept


@pytest.mark.parametrize(
    ("every", "pin", "due"),
    [(1, (), [0, 1, 2, 3, 4, 5]), (2, (), [0, 2, 4]), (3, ((1, 1), (4, 5)), [0, 1, 3, 4, 5]), (100, (), [0])],
)
def test_every_nth_rollout_and_every_pinned_one_is_due(
    every: int, pin: tuple[tuple[int, int], ...], due: list[int]
) -> None:
    settings = Settings(every=every, pin=Pins(pin))
    assert [rollout_id for rollout_id in range(6) if is_due(settings, rollout_id)] == due


def rotation(told: Told | None = None, **settings: Any) -> Rotation:
    return Rotation(Settings(**settings), Told() if told is None else told)


def write(folder: Path, rotated: Rotation, *rollout_ids: int) -> list[str]:
    for rollout_id in rollout_ids:
        path = folder / f"{rollout_id}.pt"
        if not path.is_dir():
            path.write_text("x")
        rotated.wrote(rollout_id, path)
    return sorted(path.name for path in folder.iterdir())


def test_without_a_limit_nothing_is_removed(tmp_path: Path) -> None:
    assert write(tmp_path, rotation(), 0, 1, 2) == ["0.pt", "1.pt", "2.pt"]


def test_the_last_ones_are_kept_and_what_went_is_returned(tmp_path: Path) -> None:
    rotated = rotation(keep_last=2)
    assert write(tmp_path, rotated, 0, 1, 2) == ["1.pt", "2.pt"]
    (tmp_path / "3.pt").write_text("x")
    assert rotated.wrote(3, tmp_path / "3.pt") == [(1, tmp_path / "1.pt")]


def test_pinned_ones_are_kept_beside_the_last_ones(tmp_path: Path) -> None:
    pinned = rotation(keep_last=1, pin=Pins(((0, 1),)))
    assert write(tmp_path, pinned, 0, 1, 2, 3) == ["0.pt", "1.pt", "3.pt"]


def test_what_another_run_wrote_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "7.pt").write_text("another run's")
    assert write(tmp_path, rotation(keep_last=1), 8, 9) == ["7.pt", "9.pt"]


def test_a_rollout_written_again_counts_as_the_newest(tmp_path: Path) -> None:
    assert write(tmp_path, rotation(keep_last=2), 0, 1, 0, 2) == ["0.pt", "2.pt"]


def test_a_path_that_all_rollouts_share_is_never_removed(tmp_path: Path) -> None:
    rotated, path = rotation(keep_last=1), tmp_path / "t.pt"
    path.write_text("x")
    for rollout_id in range(3):
        assert rotated.wrote(rollout_id, path) == []
    assert path.exists()


def test_a_dump_that_somebody_removed_already_is_no_error_and_not_reported(tmp_path: Path) -> None:
    told = Told()
    rotated = rotation(told, keep_last=1)
    write(tmp_path, rotated, 0)
    (tmp_path / "0.pt").unlink()
    (tmp_path / "1.pt").write_text("x")
    assert rotated.wrote(1, tmp_path / "1.pt") == []
    assert told == []


@pytest.mark.parametrize("by", ["a file", "a link", "a folder", "a pipe"])
def test_what_somebody_put_in_the_place_of_a_dump_stays(tmp_path: Path, by: str) -> None:
    rotated = rotation(keep_last=1)
    write(tmp_path, rotated, 0)
    theirs = tmp_path / "0.pt"
    theirs.unlink()
    {
        "a file": lambda: theirs.write_text("a copy of my own"),
        "a link": lambda: theirs.symlink_to("elsewhere"),
        "a folder": theirs.mkdir,
        "a pipe": lambda: os.mkfifo(theirs),
    }[by]()
    assert write(tmp_path, rotated, 1) == ["0.pt", "1.pt"]


def test_a_dump_that_cannot_be_removed_costs_nothing_but_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    rotated = rotation(told, keep_last=1)
    write(tmp_path, rotated, 0)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", failing(errno.EACCES))
        assert write(tmp_path, rotated, 1) == ["0.pt", "1.pt"]
    assert told == [f"rotation could not remove {tmp_path / '0.pt'}: Permission denied"]


# ---------------------------------------------------------------------------------------------------------------------
# Found by attacks


def test_a_pipe_whose_reader_leaves_is_an_error_and_no_other_reader_is_waited_for(tmp_path: Path, disk: Disk) -> None:
    pipe = tmp_path / "0.pt"
    os.mkfifo(pipe)

    def leave() -> None:
        with open(pipe, "rb") as file:
            file.read(10)

    reader = threading.Thread(target=leave, daemon=True)
    reader.start()
    failed: list[BaseException] = []

    def write() -> None:
        try:
            write_dump(payload(1 << 20), pipe, disk)
        except DumpError as error:
            failed.append(error)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    writer.join(20)
    assert not writer.is_alive()
    assert "tried once" in str(failed[0])
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)


@pytest.mark.parametrize("before", [None, b"a dump of before"])
def test_half_a_file_that_had_to_be_written_in_place_does_not_stay(
    tmp_path: Path, disk: Disk, before: bytes | None
) -> None:
    disk.can_rename = False
    if before is not None:
        (tmp_path / "0.pt").write_bytes(before)
    with pytest.raises(OSError, match="No space"):
        disk.write(tmp_path / "0.pt", half)
    assert list(tmp_path.iterdir()) == []


def test_half_a_file_in_place_that_cannot_be_removed_is_empty(
    path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.can_rename = False
    path.write_bytes(b"a dump of before")
    monkeypatch.setattr(os, "unlink", failing(errno.EPERM))
    with pytest.raises(OSError, match="No space"):
        disk.write(path, half)
    assert path.read_bytes() == b""


def test_a_file_that_cannot_be_opened_in_place_is_untouched(
    path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.can_rename = False
    path.write_bytes(b"a dump of before")
    monkeypatch.setattr("builtins.open", failing(errno.EACCES))
    with pytest.raises(PermissionError):
        disk.write(path, half)
    monkeypatch.undo()
    assert path.read_bytes() == b"a dump of before"


@pytest.mark.parametrize("can_rename", [True, False])
def test_the_message_says_what_became_of_the_file_that_was_there(
    path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, can_rename: bool
) -> None:
    disk.can_rename = can_rename
    path.write_bytes(b"a dump of before")
    monkeypatch.setattr(disk, "_flush_to_disk", failing(errno.ENOSPC))
    with pytest.raises(DumpError) as caught:
        write_dump(payload(8), path, disk)
    assert ("untouched" in str(caught.value)) is can_rename
    assert ("lost, because files are written in place" in str(caught.value)) is not can_rename
    assert path.exists() is can_rename


def half(file: IO[bytes]) -> None:
    file.write(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENOENT])
def test_one_file_that_is_a_mount_or_vanished_before_it_was_renamed_does_not_decide_for_the_others(
    path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, code: int
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", failing(code))
        disk.write(path, put(b"new"))
    assert path.read_bytes() == b"new"
    assert disk.can_rename is True


def test_a_name_of_long_characters_is_written_on_a_host_with_a_long_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 64)
    path = tmp_path / ("\N{PARTY POPPER}" * 60)
    assert disk.write(path, put(b"new")) == 3
    assert os.listdir(tmp_path) == [path.name]


def test_nothing_of_a_dump_is_held_once_its_file_is_written(path: Path, disk: Disk) -> None:
    """Also before any garbage is collected: it would be one more copy of the dump for each that is written."""

    class Buffer(bytearray):
        pass

    buffer = Buffer(4 * 1000)
    gone = weakref.ref(buffer)
    dump = {"rollout_id": 0, "samples": [{"log_probs": torch.frombuffer(buffer, dtype=torch.float32)}], "dp_shards": []}
    gc.collect()
    gc.disable()
    try:
        write_dump(dump, path, disk)
        del dump, buffer
        assert gone() is None
    finally:
        gc.enable()


def test_a_failed_write_in_the_background_does_not_keep_the_dump_until_the_next_one() -> None:
    class Dump:
        pass

    def write(dump: Dump) -> None:
        try:
            raise OSError(errno.ENOSPC, "full")
        except OSError as error:
            raise DumpError("no file") from error

    dump = Dump()
    gone, said = weakref.ref(dump), []
    background = BackgroundWriter(lambda where, error, lost, *, may_raise=True: said.append(str(error)), 5.0)
    background.submit(functools.partial(write, dump), "Rollout 0 has no dump.")
    del dump
    thread = background._thread
    assert thread is not None
    thread.join()
    gc.collect()
    assert gone() is None
    background.flush()
    assert said == ["no file"]


def test_a_file_grows_while_one_large_tensor_is_written(
    path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_module, "_SLICE", 1 << 10)
    monkeypatch.setattr(file_module, "_FLUSHED_ALONG", 1 << 14)
    flushed: list[int] = []

    def fsync(descriptor: int) -> None:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            flushed.append(os.fstat(descriptor).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    write_dump(payload(1 << 16), path, disk)
    assert disk.writes > (4 << 16) // (1 << 10)
    along = [size for size in flushed if 0 < size < path.stat().st_size]
    assert len(along) >= 10
    assert along == sorted(along)
    assert torch.equal(torch.load(path)["samples"][0]["x"], payload(1 << 16)["samples"][0]["x"])


def test_a_file_that_a_first_try_in_place_cost_is_said_to_be_lost_whatever_the_second_one_meets(
    path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.can_rename = False
    path.write_bytes(b"a dump of before")
    monkeypatch.setattr(file_module, "_RETRY_AFTER_S", 0.0)

    def fail_and_lock(_: int) -> None:
        monkeypatch.setattr("builtins.open", failing(errno.EACCES))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk, "_flush_to_disk", fail_and_lock)
    with pytest.raises(DumpError, match="lost, because files are written in place"):
        write_dump(payload(8), path, disk)
