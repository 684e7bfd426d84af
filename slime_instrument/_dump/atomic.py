"""One file, whole or not at all: written beside its place, flushed, then renamed over it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from slime_instrument._errors import DumpError, five_parts

__all__ = ["clean_leftovers", "write_atomically"]

_LEFTOVER = re.compile(r"^\..+\.slime_instrument-(?P<host>.+)-(?P<pid>\d+)\.part$")


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> int:
    """Call ``write(file)`` on a file beside ``path`` and rename it over ``path``. Returns its size in bytes.

    Whatever fails, ``path`` stays as it was and nothing is left beside it; OS errors become :class:`DumpError`.
    """
    # The name is cut, so that a long one plus our suffix stays a file name.
    part = path.parent / f".{path.name[:40]}.slime_instrument-{socket.gethostname()}-{os.getpid()}.part"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(0, "a folder stands in its place", str(path))
        with open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(part, path)
        _flush_folder(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
        raise DumpError(
            five_parts(
                str(path),
                expected="to write the train dump",
                found=_reason(error),
                follows="This rollout has no train dump; a file that was there before is untouched.",
                next_step="Check space, quota and rights of the folder.",
            )
        ) from error
    finally:
        with contextlib.suppress(OSError):  # also "not there": renamed, or never made
            part.unlink()
    return size


def clean_leftovers(folder: Path) -> list[Path]:
    """Remove what killed writers left in ``folder``: parts of processes of this machine that are gone."""
    removed = []
    for part in folder.glob(".*.part") if folder.is_dir() else ():
        match = _LEFTOVER.match(part.name)
        if match is None or match["host"] != socket.gethostname() or _alive(int(match["pid"])):
            continue
        with contextlib.suppress(OSError):  # not ours to remove, or gone meanwhile: no reason to lose a dump
            part.unlink()
            removed.append(part)
    return removed


def _reason(error: BaseException) -> str:
    """What the system said. torch's writer covers it with an error of its own, raised while it closes the file."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # the latter: no process can have this id
        return False
    except PermissionError:
        pass
    return True


def _flush_folder(folder: Path) -> None:
    """A rename survives a power cut only once the folder itself is flushed. Not every file system can; that is fine."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
