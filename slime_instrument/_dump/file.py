"""The file of a dump: its path, writing it whole or not at all, in the background where asked for, and rotation.

A failing write costs its own rollout and nothing after it. What stands at the path and is no regular file (a device, a
pipe, a link) is written through, as slime does. Removed are only leftovers of killed writers, and what rotation drops:
dumps of this process with the tensor files that were linked for them.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import io
import itertools
import os
import pickle
import re
import shutil
import socket
import stat
import string
import sys
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from slime_instrument._dump.contribute import ORDINARY_DTYPES
from slime_instrument._errors import DumpError, TrainingPathError, contained, describe, five_parts, not_ours, release
from slime_instrument._format.references import SPILL_SUFFIX, fate
from slime_instrument._settings import Settings

# ---------------------------------------------------------------------------------------------------------------------
# The path

_RANK_SUFFIX = "{rollout_id}_{rank}.pt"


def dump_template(args: Any) -> str:
    """The path template: ``args.save_debug_train_data``, except that ``--dump-details`` of slime before #2266, which
    names one file per rank, becomes one file per rollout under the name that slime uses since."""
    template = str(os.fspath(args.save_debug_train_data))
    details = getattr(args, "dump_details", None)
    if details is not None and template == f"{details}/train_data/{_RANK_SUFFIX}":
        return template[: -len(_RANK_SUFFIX)] + "{rollout_id}.pt"
    return template


def dump_path(template: str, rollout_id: int, rank: int) -> Path:
    return Path(template.format(rollout_id=rollout_id, rank=rank))


def dump_folder(template: str, rank: int) -> Path:
    """The folder that holds the dumps of all rollouts: the part of the path before the first one that names one."""
    parts = Path(template).parent.parts
    fixed = list(itertools.takewhile(lambda part: "{rollout_id" not in part, parts))
    return Path(str(Path(*fixed)).format(rank=rank)) if fixed else Path()


def check_template(args: Any) -> str:
    """The template, if it can hold every dump of this run; else :class:`TrainingPathError`."""
    template = dump_template(args)
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
        unknown = sorted({name for name in names if name not in ("rollout_id", "rank")})
        first, second = (dump_path(template, rollout_id, 0) if not unknown else Path() for rollout_id in (0, 1))
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise _refusal(template, f"a path template that can be filled in ({error})", repr(template)) from None
    if unknown:
        found = ", ".join("{" + name + "}" for name in unknown)
        raise _refusal(template, "only {rollout_id} and {rank} as placeholders", found)
    if first == second and _number_of_rollouts(args) != 1 and not is_special(first):
        found = "a path without {rollout_id}, for several rollouts"
        raise _refusal(template, "a different file for each rollout", found)
    rollout_template = getattr(args, "save_debug_rollout_data", None)
    if rollout_template is not None and _same_file(rollout_template, template):
        raise _refusal(template, "another path than --save-debug-rollout-data", "the same path for both")
    return template


def check_writable(template: str, rank: int, disk: Disk, first_rollout: int = 0) -> None:
    """Do in the first dump's folder what a dump will do: make a file, flush it, rename it. :class:`TrainingPathError`
    where the folder takes nothing; what is merely missing there (flushing, renaming) is noted in ``disk``, and so is a
    full disk, which may have room by the first dump."""
    path = dump_path(template, first_rollout, rank)
    if path.is_symlink() or is_special(path):
        return
    probe = path.parent / f".slime_instrument.probe.{socket.gethostname()}.{os.getpid()}"
    try:
        try:
            disk.write(probe, lambda file: file.write(b"probe"))
        except OSError:
            time.sleep(_RETRY_AFTER_S)
            disk.write(probe, lambda file: file.write(b"probe"))
    except OSError as error:
        found = f"{error.strerror or error}; {free_space(path.parent)}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            disk.say_once(f"{path.parent} takes no file now: {found}. Dumps are lost until there is room.")
            return
        raise _refusal(template, f"a folder {path.parent} in which files can be made", found) from error
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _number_of_rollouts(args: Any) -> int | None:
    total = getattr(args, "num_rollout", None)
    return None if total is None else int(total) - int(getattr(args, "start_rollout_id", None) or 0)


def _same_file(rollout_template: Any, template: str) -> bool:
    try:
        other = Path(os.fspath(rollout_template).format(rollout_id=0))
        ours = dump_path(template, 0, 0)
        return os.path.realpath(other) == os.path.realpath(ours) and not is_special(ours)
    except (KeyError, IndexError, ValueError, TypeError):
        return False  # slime's own concern; it fails there with slime's message


def is_special(path: Path) -> bool:
    """Whether something stands at ``path``, links followed, that is neither a regular file nor a folder."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _refusal(template: str, expected: str, found: str) -> TrainingPathError:
    return TrainingPathError(
        five_parts(
            f"--save-debug-train-data {template}",
            expected=expected,
            found=found,
            follows="Training is not started, because its dumps would be lost.",
            next_step="Use a path such as dumps/train_data/{rollout_id}.pt.",
        )
    )


# ---------------------------------------------------------------------------------------------------------------------
# Writing

_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
# EBUSY: the file is itself a mount. ENOENT: somebody removes files that they do not know.
_NO_RENAME_ONCE = frozenset({errno.EBUSY, errno.ENOENT})
_NO_RENAME = _UNSUPPORTED | _NO_RENAME_ONCE | {errno.EPERM, errno.EXDEV}
_LEFTOVER = re.compile(r"^\..+\.slime_instrument-(?P<host>.+?)-(?P<pid>\d+)(-\d+)?\.part$")
_number = itertools.count()


class Disk:
    """Writes files. ``say`` is told, once each, what the file system cannot do."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told: set[str] = set()
        self.can_rename = True
        self.in_place = False
        """The last file was not written beside its path but there, where a failure costs what stood there before."""
        self.writes = 0
        """Counts on while a file grows."""

    def write(self, path: Path, fill: Callable[[IO[bytes]], Any]) -> int:
        """Call ``fill(file)`` on a file beside ``path`` and rename it over ``path``. Returns the size in bytes.

        Whatever fails, ``path`` stays as it was and nothing is left beside it; see :attr:`in_place` for the exception,
        after which nothing is there. An existing file's mode and owner stay. A link's target is written, not the link.
        Raises OSError, and whatever ``fill`` raises.
        """
        self.in_place = False
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if is_special(path):
            return self._write_through(path, fill)
        if path.is_symlink():
            path = Path(os.path.realpath(path))
            if path.is_symlink():
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        if not self.can_rename:
            return self._write_through(path, fill)
        try:
            part = self._make_part(path)
        except PermissionError:
            if path.is_file():
                return self._write_through(path, fill)  # the folder takes no new file, but this one may be written
            raise
        try:
            with part as file:
                fill(file)
                file.flush()
                self._flush_to_disk(file.fileno())
                size = file.tell()
                _keep_mode_and_owner(path, file.fileno())
            try:
                os.replace(part.name, path)
            except OSError as error:
                if error.errno not in _NO_RENAME:
                    raise
                self.can_rename = error.errno in _NO_RENAME_ONCE
                self.say_once(f"{path.parent} cannot rename files ({error.strerror}); they are written in place")
                return self._write_through(path, fill)
        finally:
            with contextlib.suppress(OSError):  # also "not there": renamed
                os.unlink(part.name)
        _flush_folder(path.parent)
        return size

    def _write_through(self, path: Path, fill: Callable[[IO[bytes]], Any]) -> int:
        try:
            with open(path, "wb") as file:
                self.in_place = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
                fill(file)
                file.flush()
                if self.in_place:
                    self._flush_to_disk(file.fileno())
                    return file.tell()
        except BaseException:
            if self.in_place:  # half a file is worse than none
                with contextlib.suppress(OSError):
                    os.truncate(path, 0)  # where it cannot be removed
                    os.unlink(path)
            raise
        return 0

    def _make_part(self, path: Path) -> IO[bytes]:
        """A new file beside ``path``, locked while it is written so that nobody takes it for a leftover."""
        while True:
            # The name is cut, so that a long one plus our suffix stays a file name; in bytes, as the system counts.
            owner = f"{socket.gethostname()}-{os.getpid()}-{next(_number)}"
            name = os.fsdecode(os.fsencode(path.name)[:40])
            part = path.parent / f".{name}.slime_instrument-{owner}.part"
            try:
                file = open(part, "xb")  # noqa: SIM115  # the caller closes it
            except FileExistsError:
                continue
            _lock(file.fileno())
            return file

    def flush_along(self, file: IO[bytes]) -> None:
        """Flush what has been written of a long file so far."""
        file.flush()
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            self._flush_to_disk(file.fileno())
            self.writes += 1

    def _flush_to_disk(self, descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            self.say_once(f"the file system of the dumps cannot flush files to disk ({error.strerror})")

    def say_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._say(text)


def _keep_mode_and_owner(path: Path, descriptor: int) -> None:
    """Give the new file those of the file that it replaces; as far as this process may."""
    with contextlib.suppress(OSError):
        old = os.stat(path)
        new = os.fstat(descriptor)
        if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
            with contextlib.suppress(OSError):
                os.fchown(descriptor, old.st_uid, old.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


def _lock(descriptor: int) -> bool:
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _flush_folder(folder: Path) -> None:
    """A rename survives a power cut only once the folder itself is flushed. Not every file system can; that is fine."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def clean_leftovers(folder: Path) -> list[Path]:
    """Remove what killed writers left in ``folder``: parts of processes of this machine that are gone."""
    removed = []
    for part in sorted(folder.glob(".*.part")) if folder.is_dir() else ():
        match = _LEFTOVER.match(part.name)
        if match is None or match["host"] != socket.gethostname() or _alive(int(match["pid"])):
            continue
        with contextlib.suppress(OSError):  # not ours to remove, or gone meanwhile: no reason to lose a dump
            if not stat.S_ISREG(part.lstat().st_mode):
                continue
            with open(part, "rb") as file:
                # Another container may have the same host name and other process ids: a locked file has a writer.
                if not _lock(file.fileno()):
                    continue
                part.unlink()
                removed.append(part)
    return removed


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # the latter: no process can have this id
        return False
    except PermissionError:
        pass
    return True


def free_space(folder: Path) -> str:
    """How much room ``folder`` has, in words; also where it cannot be told."""
    while folder != folder.parent and not folder.exists():
        folder = folder.parent
    try:
        return f"{shutil.disk_usage(folder).free / 1e6:.0f} MB free"
    except OSError as error:
        return f"free space unknown: {error.strerror}"


# ---------------------------------------------------------------------------------------------------------------------
# The dump in its file

_RETRY_AFTER_S = 1.0


def write_dump(payload: dict[str, Any], path: Path, disk: Disk) -> int:
    """Write ``payload`` to ``path``; returns the size in bytes. A write that the system refuses is tried once more
    after a pause. A field that torch cannot save is left out of ``payload``, with the reason in its provenance.

    Raises :class:`DumpError` with the path, the reason and the free space.
    """
    in_place = False
    try:
        try:
            return _write_once(payload, path, disk)
        except OSError:
            in_place = disk.in_place
            if is_special(path):  # a pipe whose reader has gone would wait for another one
                raise
            time.sleep(_RETRY_AFTER_S)
            return _write_once(payload, path, disk)
    except OSError as refused:
        tried = "tried once" if is_special(path) else "tried twice"
        raise DumpError(
            five_parts(
                str(path),
                expected="to write the train dump",
                found=f"{refused.strerror or describe(refused)} ({tried}; {free_space(path.parent)})",
                follows="This rollout has no train dump; a file that was there before is "
                + ("lost, because files are written in place here." if in_place or disk.in_place else "untouched."),
                next_step="Check space, quota and rights of the folder.",
            )
        ) from refused


def _write_once(payload: dict[str, Any], path: Path, disk: Disk) -> int:
    """Raises OSError where the system refuses, :class:`DumpError` where torch cannot save the payload at all."""
    for save in (_save_fast, torch.save, torch.save):
        watched = _Watched(disk)
        try:
            return disk.write(path, functools.partial(_save_watched, save, payload, watched))
        except Exception as error:
            if isinstance(error, OSError) or not_ours(error):
                raise
            if watched.refused is not None:
                # By its parts: raised itself, it would be held by this frame, which its own traceback holds.
                raise OSError(watched.refused.errno, watched.refused.strerror) from None
            # Nothing was refused, so the payload is the cause: next torch's own way, then without some fields.
            if save is torch.save and not _leave_out_what_cannot_be_saved(payload):
                raise DumpError(f"torch cannot save the dump: {describe(error)}") from error
    raise DumpError("torch cannot save the dump, whatever is left out of it")


def _save_watched(save: Callable[[Any, Any], None], payload: Any, watched: _Watched, file: IO[bytes]) -> None:
    watched.file = file
    save(payload, watched)


class _Watched:
    """A file for ``torch.save`` that remembers what the system refused: torch covers that with an error of its own."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.file: IO[bytes] = io.BytesIO()
        self.refused: OSError | None = None
        self._since_flush = 0

    def write(self, data: Any) -> int:
        """In slices: torch gives a whole tensor at once, and who waits for the file wants to see it grow."""
        whole = memoryview(data).cast("B")
        try:
            for start in range(0, len(whole), _SLICE):
                part = whole[start : start + _SLICE]
                self.file.write(part)
                self._disk.writes += 1
                self._since_flush += len(part)
                if self._since_flush >= _FLUSHED_ALONG:  # else the last flush may stand still for minutes
                    self._since_flush = 0
                    self._disk.flush_along(self.file)
        except OSError as error:
            self.refused = OSError(error.errno, error.strerror)
            raise
        return len(whole)

    def flush(self) -> None:
        self.file.flush()


_SLICE = 64 << 20
_FLUSHED_ALONG = 1 << 30
"""So many bytes, then they are flushed to the disk."""


def _leave_out_what_cannot_be_saved(payload: dict[str, Any]) -> bool:
    """Take fields out of ``payload`` that torch cannot save. Whether there were any."""
    bad: dict[Any, str] = {}
    holders: list[dict[Any, Any]] = [*payload["samples"], *payload["dp_shards"], payload]
    for holder in holders:
        for name in [name for name in holder if name not in ("samples", "dp_shards")]:
            with contained(functools.partial(bad.__setitem__, name)):
                if name not in bad:
                    torch.save(holder[name], _Nowhere())  # type: ignore[arg-type]
    _leave_out(payload, bad)
    return bool(bad)


def _leave_out(payload: dict[str, Any], bad: Mapping[Any, str]) -> None:
    holders: list[dict[Any, Any]] = [*payload["samples"], *payload["dp_shards"], payload]
    for holder in holders if bad else ():
        for name in bad:
            holder.pop(name, None)
    for shard in payload["dp_shards"] if bad else ():
        shard.setdefault("provenance", {}).setdefault("left_out", {}).update({str(n): why for n, why in bad.items()})


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)

    def flush(self) -> None:
        pass


def _save_fast(payload: Any, file: Any) -> None:
    """``torch.save`` with a pickler that does not ask about every object. The file is the same kind of file.

    Two thirds of the time to save some thousand small tensors go into Python calls per pickled object: torch asks for
    a persistent id of every integer and every key, and each tensor describes its storage anew. Both are answered from
    a table here. It goes in through ``torch.save``'s own ``pickle_module`` argument; a torch that would not use it this
    way still gets a right file, only slower.
    """
    torch.save(payload, file, pickle_module=sys.modules[__name__])


class Pickler(pickle.Pickler):
    """Base of the pickler class that ``torch.save`` makes for itself by adding ``persistent_id``."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        torchs_own = cls.__dict__.get("persistent_id")
        if torchs_own is not None:
            setattr(cls, "persistent_id", _only_for_storages(torchs_own))  # noqa: B010 - a method cannot be assigned to

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._storages: dict[tuple[int, torch.dtype], Any] = {}
        self._nothing: OrderedDict[str, Any] = OrderedDict()  # a tensor's hooks, always none
        self._ids: dict[int, tuple[Any, Any]] = {}

    def reducer_override(self, value: Any) -> Any:
        """A plain tensor as torch reduces it, except that views of one flat tensor share the object of its storage."""
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return NotImplemented
        if value.requires_grad or value.is_conj() or value.is_neg() or value.is_quantized or value.is_nested:
            return NotImplemented
        if value.dtype not in ORDINARY_DTYPES:  # it has no typed storage for the others
            return NotImplemented
        untyped = value.untyped_storage()
        key = untyped._cdata, value.dtype
        storage = self._storages.get(key)
        if storage is None:
            storage = self._storages[key] = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
                wrap_storage=untyped, dtype=value.dtype, _internal=True
            )
        place = storage, value.storage_offset(), tuple(value.shape), value.stride(), False, self._nothing
        return torch._utils._rebuild_tensor_v2, place


def _only_for_storages(torchs_own: Any) -> Any:
    typed, untyped = torch.storage.TypedStorage, torch.UntypedStorage

    def persistent_id(self: Any, value: Any) -> Any:
        kind = type(value)
        if kind is not typed and kind is not untyped:
            return None
        # The pickler's, which ends with the file; the class, made for one file, stays until garbage is collected.
        ids = self._ids
        if id(value) not in ids:
            ids[id(value)] = value, torchs_own(self, value)  # held, so that the number stays this object's
        return ids[id(value)][1]

    return persistent_id


# ---------------------------------------------------------------------------------------------------------------------
# The files that a dump refers to


def keep_references(payload: dict[str, Any], path: Path) -> Path | None:
    """Give the files that samples refer to a life of their own, as slime does: hard links (copies where there can be
    none) in a new folder below ``<stem>_r3_spill``, which is returned. Nothing is read. A field whose file cannot be
    had is left out of ``payload``, with the reason in its provenance."""
    if is_special(path):
        return None
    folder = path.parent / (path.stem + SPILL_SUFFIX) / uuid.uuid4().hex
    kept: dict[str, Any] = {}
    bad: dict[Any, str] = {}
    for sample in payload["samples"]:
        for name, value in sample.items():
            kind: Any = type(value)
            if name in bad or fate(kind) != "kept":
                continue
            with contained(functools.partial(bad.__setitem__, name)):
                if value.path not in kept:
                    kept[value.path] = value.link(folder / f"{len(kept)}_{Path(value.path).name}")
                sample[name] = kept[value.path]
    _leave_out(payload, bad)
    return folder if kept else None


def remove_references(folder: Path) -> None:
    """Remove what :func:`keep_references` made, and the folder that holds it unless there is more in it."""
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


# ---------------------------------------------------------------------------------------------------------------------
# In the background


class Report(Protocol):
    """How a failure is dealt with: ``FailurePolicy.report``."""

    def __call__(self, where: str, error: BaseException, lost: str, *, may_raise: bool = True) -> Any: ...


_AT_EXIT_S = 10.0
"""A write that stands still is given at least this long at exit: nobody else waits then."""


class BackgroundWriter:
    """Writes at most one file at a time on a thread of its own; ``report`` gets what went wrong there, on the thread
    that finds out: at the next dump, or at exit.

    A process that ends by itself waits for the pending file as long as the file grows. Signals are left alone: what a
    killed process had pending is missing, never half there, and the run's journal names it.
    """

    def __init__(self, report: Report, timeout_s: float) -> None:
        self._report, self._timeout_s = report, timeout_s
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lost = ""
        self._at_exit = False
        self.moved: Callable[[], int] = lambda: 0

    @property
    def pending(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def submit(self, work: Callable[[], None], lost: str, moved: Callable[[], int] = lambda: 0) -> None:
        """Start ``work`` once the work before it has ended. ``lost``: what is lost when it fails, as a sentence.
        ``moved``: a number that changes as long as the work goes on."""
        self.flush()
        if not self._at_exit:
            _at_exit(self._finish)
            self._at_exit = True
        self._lost, self.moved = lost, moved
        thread = threading.Thread(target=self._run, args=(work,), name="slime_instrument-write", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no thread can be had, such as while the interpreter ends
            self._run(work)
            self.flush()
            return
        self._thread = thread

    def flush(self, *, may_raise: bool = True) -> None:
        """Wait for the pending work, and report its failure if it has one."""
        if self._thread is not None:
            self._thread.join()  # forgotten only afterwards: a signal may come while this waits
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            self._report("asynchronous writing", error, self._lost, may_raise=may_raise)

    def _finish(self) -> None:
        """At exit: wait while the file grows; name what is then still pending."""
        while self._thread is not None and self._thread.is_alive():
            before = self.moved()
            self._thread.join(max(self._timeout_s, _AT_EXIT_S))
            if self._thread.is_alive() and self.moved() == before:
                stuck = DumpError(
                    f"the file did not grow for {max(self._timeout_s, _AT_EXIT_S):g} s when the process ended"
                )
                self._report("asynchronous writing", stuck, self._lost, may_raise=False)
                return
        self.flush(may_raise=False)

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            del work  # it and the error's frames hold the dump, and nobody asks for the error until the next one
            release(error)
            self._error = error


def _at_exit(function: Callable[[], None]) -> None:
    """Run ``function`` when the main thread ends: also in a forked process of multiprocessing's, which ends without
    what is registered with ``atexit``."""
    getattr(threading, "_register_atexit", atexit.register)(function)


# ---------------------------------------------------------------------------------------------------------------------
# Which dumps are made, and which are kept


class Rotation:
    """Keeps the last ``KEEP_LAST`` rollouts' dumps that this process wrote, and all pinned ones. Removes nothing else
    but the folders of tensor files that were made for the removed ones."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._settings, self._say = settings, say
        self._written: dict[int, dict[Path, tuple[int, int] | None]] = {}
        self._references: dict[Path, list[Path]] = {}

    def wrote(self, rollout_id: int, path: Path, references: Path | None = None) -> list[tuple[int, Path]]:
        """Note a new dump and remove those that are now too old; returns what was removed, by rollout.
        ``references``: as :func:`keep_references` gave it."""
        if references is not None:
            self._references.setdefault(path, []).append(references)
        for paths in self._written.values():
            paths.pop(path, None)  # written again, for another rollout
        if rollout_id not in self._settings.pin:
            paths = self._written.pop(rollout_id, {})
            self._written[rollout_id] = {**paths, path: _identity(path)}
        keep = self._settings.keep_last
        removed = []
        while keep is not None and len(self._written) > keep:
            oldest = next(iter(self._written))
            for old, as_written in self._written.pop(oldest).items():
                if as_written is None or as_written != _identity(old):
                    continue  # no file of ours, gone, or replaced by somebody's own
                try:
                    old.unlink()
                except OSError as error:  # somebody else's doing; the new dump is written all the same
                    self._say(f"rotation could not remove {old}: {error.strerror}")
                else:
                    removed.append((oldest, old))
                    for folder in self._references.pop(old, ()):
                        remove_references(folder)
        return removed


def _identity(path: Path) -> tuple[int, int] | None:
    """Which regular file is at ``path``, and in which version; None where there is none, or a link or device."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns) if stat.S_ISREG(status.st_mode) else None
