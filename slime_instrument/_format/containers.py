"""What sort of file this is, and whether the sizes it declares fit into it. Nothing is unpickled here.

A dump is a zip archive as torch.save writes it, or a plain pickle.
"""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from slime_instrument._errors import DumpFormatError

_ZIP_MAGIC = b"PK\x03\x04"
_PICKLE_MAGIC = b"\x80"
# The number that torch put in front of its files before they were zip archives, pickled with protocol 2.
_OLD_TORCH_MAGIC = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
_STRAW = b'"slime.straw-debug"'
_LOCAL_HEADER_SIZE = 30

# torch's safe unpickler allows these, and each takes memory by a number that the file merely states. Dumps have no use
# for them. A GLOBAL instruction holds module and name as they stand here, so a search of the bytes finds every one.
_ALLOCATING_GLOBAL = re.compile(
    rb"c(__builtin__|builtins)\n(bytearray)\n"
    rb"|c(torch\._utils)\n(_rebuild_qtensor)\n"
    rb"|c(torch\.storage)\n((?:Untyped|Typed)Storage)\n"
    rb"|c(torch(?:\.\w+)*)\n(\w*Tensor)\n"
)


@dataclass(frozen=True)
class Archive:
    """The records of a file that torch.save wrote as a zip archive.

    Attributes:
        pickle: the record ``data.pkl``.
        records: all records, by their name below the archive's folder.
    """

    pickle: zipfile.ZipInfo
    records: Mapping[str, zipfile.ZipInfo]


@dataclass(frozen=True)
class Container:
    """One file before it is unpickled.

    Attributes:
        kind: ``zip`` (torch.save) or ``pickle``.
        size: bytes of the file.
        tensor_bytes: bytes that a zip has for tensor values: the sum of its data records; 0 for a pickle.
        head: first bytes of the pickle, enough to see the first keys of the dump.
        allocating_global: a class in the pickle that would take memory by a stated number, or None.
        archive: the records of a zip.
    """

    kind: Literal["zip", "pickle"]
    size: int
    tensor_bytes: int
    head: bytes
    allocating_global: str | None = None
    archive: Archive | None = None


def unusable(path: Path, found: str, *, next_step: str = "") -> DumpFormatError:
    """Build the one-line error for a file that is no dump; the caller raises it."""
    message = f"{path}: {found}. Not read."
    return DumpFormatError(f"{message} {next_step}" if next_step else message)


def examine(path: Path) -> Container:
    """Find out what ``path`` is, and refuse what cannot be a dump.

    Raises:
        DumpFormatError: a directory, a device, an empty, cut or foreign file, or sizes that do not fit into the file.
        OSError: the file is missing or may not be read.
    """
    status = os.stat(path)
    if stat.S_ISDIR(status.st_mode):
        raise unusable(path, "is a directory, not a dump file")
    if not stat.S_ISREG(status.st_mode):
        # Opening a pipe or a device can block for ever.
        raise unusable(path, "is not a regular file")
    if status.st_size == 0:
        raise unusable(path, "is empty", next_step="It may be left over from a run that was killed while writing.")
    with open(path, "rb") as file:
        head = file.read(1024)
    if head.startswith(_ZIP_MAGIC):
        return _examine_zip(path, status.st_size)
    if head.startswith(_OLD_TORCH_MAGIC):
        raise unusable(
            path,
            "is in torch's format from before 1.6, which slime never wrote",
            next_step="torch.load and torch.save write it anew.",
        )
    if head.startswith(_PICKLE_MAGIC):
        return Container("pickle", status.st_size, 0, head)
    if head.lstrip().startswith(b"{") and (path.name.endswith(".straw.json") or _STRAW in head):
        raise unusable(
            path,
            "is the index of an archive of slime's rollout queue, which this release does not read yet",
            next_step="Where slime is: slime.data.archive.RolloutArchive(path).export_pt(out) makes a dump of it.",
        )
    raise unusable(path, "is neither a torch file nor a pickle")


def looks_like_train_dump(container: Container) -> bool:
    """Whether the first keys are those of a train dump. Those never need more than the safe loader."""
    return b"format_version" in container.head or b"rollout_data" in container.head


def _examine_zip(path: Path, size: int) -> Container:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, OverflowError) as error:
        raise unusable(path, f"is a cut or damaged torch file ({_first_line(error)})") from error
    pickles = [member for member in members if member.filename.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise unusable(path, "is a zip archive without data.pkl, so torch.save did not write it")
    for member in members:
        # torch.save never compresses; a compressed member could unfold into any amount of memory.
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise unusable(path, f"has a compressed member {member.filename!r}, which torch.save never writes")
    declared = sum(member.file_size for member in members)
    if declared > size:
        raise unusable(path, f"declares {declared} bytes of content, but the file has {size}")
    folder = pickles[0].filename[: -len("data.pkl")]
    records = {name[len(folder) :]: member for member in members if (name := member.filename).startswith(folder)}
    tensor_bytes = sum(member.file_size for name, member in records.items() if name.startswith("data/"))
    head, allocating = _scan_pickle(path, pickles[0])
    return Container("zip", size, tensor_bytes, head, allocating, Archive(pickles[0], records))


def record_bounds(path: Path, content: mmap.mmap, member: zipfile.ZipInfo) -> tuple[int, int]:
    """Where the bytes of a stored record begin and end in the mapped file.

    Raises:
        DumpFormatError: it is not where the archive says, or ends after the file.
    """
    header = content[member.header_offset : member.header_offset + _LOCAL_HEADER_SIZE]
    if len(header) < _LOCAL_HEADER_SIZE or not header.startswith(_ZIP_MAGIC):
        raise unusable(path, f"is a cut or damaged torch file ({_base(member.filename)} is not where the archive says)")
    name_size, extra_size = struct.unpack("<HH", header[26:30])
    start: int = member.header_offset + _LOCAL_HEADER_SIZE + name_size + extra_size
    end = start + member.file_size
    if end > len(content):
        raise unusable(path, f"is a cut or damaged torch file ({_base(member.filename)} ends after the file)")
    return start, end


def _scan_pickle(path: Path, member: zipfile.ZipInfo) -> tuple[bytes, str | None]:
    """First bytes of a stored member, and the first allocating class in it; without copying the member."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start, end = record_bounds(path, content, member)
        match = _ALLOCATING_GLOBAL.search(content, start, end)
        found = None
        if match is not None:
            found = ".".join(part.decode() for part in match.groups() if part is not None)
        return content[start : min(end, start + 512)], found


def _base(name: str) -> str:
    return name.partition("/")[2] or name


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
