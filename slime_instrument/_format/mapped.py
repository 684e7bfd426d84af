"""Read what torch.save wrote without unpickling number by number, and with every tensor left in the file.

torch's own safe loader is the reference and takes whatever is refused here. This one exists because a rollout dump is
mostly long lists of Python numbers: torch makes an object of each, at many times the size and the time of the numbers.
"""

from __future__ import annotations

import contextlib
import mmap
import pickle
import re
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import torch

from slime_instrument._format.containers import Archive, record_bounds
from slime_instrument._format.mapped_tensors import STORAGE_TYPES, RebuildTensor, StorageType, Unfamiliar
from slime_instrument._format.unpickling import Inert

__all__ = ["Mappings", "Unfamiliar", "load_mapped", "mappings"]

# Picklers write a list as batches of at most this many items, each between MARK and APPENDS.
_BATCH = 1000
_INTEGERS = re.compile(rb"(?:K.|M..|J....){2,%d}" % _BATCH, re.DOTALL)
_FLOATS = re.compile(rb"(?:G.{8}){2,%d}" % _BATCH, re.DOTALL)
_LONG = 64  # shorter lists stay lists
_HELD = 256  # records that are looked at before memory is given back
_MARK, _APPENDS = pickle.MARK[0], pickle.APPENDS[0]
_MEMO_SIZES = {pickle.BINPUT[0]: 2, pickle.LONG_BINPUT[0]: 5, pickle.MEMOIZE[0]: 1}

# What torch does not write. Frames are read ahead, so the file would stand somewhere else than the unpickler.
_NOT_WRITTEN = (pickle.FRAME, pickle.DUP, pickle.POP, pickle.POP_MARK, pickle.GET)


class Mappings:
    """The files that were mapped while this was current."""

    def __init__(self) -> None:
        self.contents: list[mmap.mmap] = []

    def release(self) -> None:
        """Give back the memory of what was read; it is read again where it is needed.

        Only for tensors that nobody has changed in place: the changes would be lost.
        """
        for content in self.contents:
            _give_back(content)


_CURRENT: ContextVar[Mappings | None] = ContextVar("mappings", default=None)


@contextlib.contextmanager
def mappings() -> Iterator[Mappings]:
    """Collects the files that are mapped inside."""
    token = _CURRENT.set(collected := Mappings())
    try:
        yield collected
    finally:
        _CURRENT.reset(token)


def load_mapped(path: Path, archive: Archive, *, compact: bool) -> Any:
    """Load the object in a file that torch.save wrote.

    Args:
        path: the file.
        archive: where its records are.
        compact: give long lists of ints, or of floats, as ``array("i")`` and ``array("d")``.

    Raises:
        Unfamiliar: anything but tensors of the usual types, plain values, dicts, lists and tuples.
        Exception: whatever a damaged pickle makes an unpickler raise.
    """
    with open(path, "rb") as file:
        # Copy on write: a tensor may be changed in place, and the file stays as it is.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    current = _CURRENT.get()
    if current is not None:
        current.contents.append(content)
    order = archive.records.get("byteorder")
    if order is not None and content[slice(*record_bounds(path, content, order))] != b"little":
        raise Unfamiliar("byte order")
    found = _Mapped(path, content, archive, compact=compact).load()
    _give_back(content)
    return found


def _give_back(content: mmap.mmap) -> None:
    if hasattr(content, "madvise"):  # not on every system
        content.madvise(mmap.MADV_DONTNEED)


def _fits(value: Any, numbers: array[Any]) -> bool:
    """Whether ``numbers`` can take up ``value`` and give it back as it is."""
    if numbers.typecode == "d":
        return type(value) is float
    return type(value) is int and -(2**31) <= value < 2**31


class _Mapped(Inert):
    """The inert unpickler, with tensors, and with batches of numbers taken as a whole."""

    # Of the unpickler in Python; typeshed knows only the one in C.
    stack: list[Any]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: handler for code, handler in Inert.dispatch.items() if bytes([code]) not in _NOT_WRITTEN
    }

    def __init__(self, path: Path, content: mmap.mmap, archive: Archive, *, compact: bool) -> None:
        self.start, self.end = record_bounds(path, content, archive.pickle)
        content.seek(self.start)
        super().__init__(content)
        self.path, self.content, self.records, self.compact = path, content, archive.records, compact
        self.storages: dict[str, torch.Tensor] = {}
        self.keys: dict[int, int] = {}
        """id of an array -> its number in the memo, which keeps it alive."""
        self.shared: set[int] = set()
        """ids of arrays that stand in several places."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return RebuildTensor()
        if module == "torch" and name in STORAGE_TYPES:
            return StorageType(STORAGE_TYPES[name])
        raise Unfamiliar(f"{module}.{name}")

    def persistent_load(self, saved_id: Any) -> torch.Tensor:
        _, kind, key, _, numel = saved_id
        if not isinstance(kind, StorageType) or type(key) is not str or type(numel) is not int or numel < 0:
            raise Unfamiliar("storage")
        if key not in self.storages:
            if len(self.storages) % _HELD == _HELD - 1:
                # Each look at the head of a record brings its neighbourhood into memory; together that is the file.
                _give_back(self.content)
            start, end = record_bounds(self.path, self.content, self.records[f"data/{key}"])
            if numel * kind.dtype.itemsize > end - start:
                raise Unfamiliar("storage larger than its record")
            self.storages[key] = (
                torch.frombuffer(self.content, dtype=kind.dtype, count=numel, offset=start)
                if numel
                else torch.empty(0, dtype=kind.dtype)
            )
        found = self.storages[key]
        if found.dtype != kind.dtype or len(found) != numel:
            raise Unfamiliar("storage of two types")
        return found

    def _numbers(self, at: int) -> array[Any] | None:
        """The numbers of the batch whose MARK is at ``at``, if it is one of numbers; the file stands behind it then."""
        for pattern, kind in ((_INTEGERS, "i"), (_FLOATS, "d")):
            found = pattern.match(self.content, at + 1, self.end)
            if found is None or self.content[found.end()] != _APPENDS:
                continue
            self.content.seek(found.end() + 1)
            if kind == "i":
                # Nothing but BININT instructions is in it.
                return array("i", pickle.loads(b"\x80\x02](" + found[0] + b"e."))
            return array("d", struct.unpack(">" + "xd" * (len(found[0]) // 9), found[0]))
        return None

    def load_empty_list(self) -> None:
        at = self.content.tell()
        mark = at + _MEMO_SIZES.get(self.content[at], 0)
        if not self.compact or self.content[mark] != _MARK:
            self.append([])
            return
        numbers = self._numbers(mark)
        if numbers is None or len(numbers) < _LONG:
            self.append([] if numbers is None else numbers.tolist())
        else:
            self.append(numbers)
        if numbers is not None and mark > at:
            # The instruction between the two gives the list its number in the memo.
            behind = self.content.tell()
            self.content.seek(at + 1)
            self.dispatch[self.content[at]](self)
            self.content.seek(behind)
            self.keys[id(numbers)] = next(key for key in reversed(self.memo) if self.memo[key] is self.stack[-1])

    def load_mark(self) -> None:
        goal = self.stack[-1] if self.stack else None
        if isinstance(goal, (list, array)):
            numbers = self._numbers(self.content.tell() - 1)
            if numbers is not None:
                if isinstance(goal, array) and goal.typecode != numbers.typecode:
                    goal = self._as_list(goal)
                goal.extend(numbers)
                return
        super().load_mark()  # type: ignore[misc]

    def load_append(self) -> None:
        value = self.stack.pop()
        goal = self.stack[-1]
        if isinstance(goal, array) and not _fits(value, goal):
            goal = self._as_list(goal)
        goal.append(value)

    def load_appends(self) -> None:
        values = self.pop_mark()  # type: ignore[attr-defined]
        goal = self.stack[-1]
        if isinstance(goal, array):
            goal = self._as_list(goal)
        goal.extend(values)

    def load_binget(self) -> None:
        super().load_binget()  # type: ignore[misc]
        self._share()

    def load_long_binget(self) -> None:
        super().load_long_binget()  # type: ignore[misc]
        self._share()

    def load_build(self) -> None:
        raise Unfamiliar("an object with a state")

    def _as_list(self, numbers: array[Any]) -> list[Any]:
        """Turn an array back into the list that it stands for, on the stack and in the memo."""
        if id(numbers) in self.shared:
            raise Unfamiliar("a list that grows after it was used")
        found = numbers.tolist()
        self.stack[-1] = found
        key = self.keys.get(id(numbers), -1)
        if self.memo.get(key) is numbers:
            self.memo[key] = found
        return found

    def _share(self) -> None:
        if isinstance(self.stack[-1], array):
            self.shared.add(id(self.stack[-1]))

    dispatch[pickle.BINGET[0]] = load_binget
    dispatch[pickle.LONG_BINGET[0]] = load_long_binget
    dispatch[pickle.EMPTY_LIST[0]] = load_empty_list
    dispatch[pickle.MARK[0]] = load_mark
    dispatch[pickle.APPEND[0]] = load_append
    dispatch[pickle.APPENDS[0]] = load_appends
    dispatch[pickle.BUILD[0]] = load_build
