"""Unpicklers that create nothing but data: no class is looked up, no code of the file runs.

:func:`load_archive` reads what torch.save wrote, with every tensor left in the file. It exists because a rollout dump
is mostly long lists of Python numbers: torch's own safe loader makes an object of each, at many times the size and the
time of the numbers. What it does not know it refuses with :class:`UnsupportedPickle`, and torch's loader has the last
word. :func:`load_plain` reads plain pickles. :func:`forgiving_pickle` is for files that the user trusts.
"""

from __future__ import annotations

import functools
import io
import math
import mmap
import pickle
import re
import struct
from array import array
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

import torch

from slime_instrument._errors import DumpFormatError
from slime_instrument._format.containers import Archive, record_bounds
from slime_instrument._format.references import TensorReference, is_reference_class


class ObjectRefused(Exception):
    """A pickle asks for a class or function that the safe way does not give. ``str()`` is its qualified name."""


class UnsupportedPickle(Exception):
    """A torch file holds something that :func:`load_archive` leaves to torch's loader. ``str()`` says what."""


# What Python's unpickler raises for a damaged pickle, whose instructions find the wrong things on its stack.
_DAMAGE = (pickle.UnpicklingError, EOFError, LookupError, TypeError, ValueError, AttributeError, struct.error)


class Opaque:
    """Stands in for an object whose class is not importable here, so that a dump can be read without slime.

    Attributes:
        state: what the pickle gave to the object: its ``__dict__`` or the arguments of its class.
    """

    qualified_name = ""
    state: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args or kwargs:
            self.state = (args, kwargs)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __repr__(self) -> str:
        return f"<{self.qualified_name}>"


class UnreadTensor(Opaque):
    """Stands in for a tensor that is no plain array of numbers: sparse, quantized, nested, or a view that repeats its
    elements. A run may dump such; they are named, and everything else in the file is read.

    Attributes:
        kind: what it is, in words.
        shape: its shape, where the file says it.
    """

    def __init__(self, kind: str, shape: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.kind, self.shape = kind, shape
        self.qualified_name = f"a {kind}" + ("" if shape is None else f" of shape {tuple(shape)}")


# --- NumPy without NumPy: arrays become tensors, scalars become numbers ---

_NUMPY_TYPES = {
    "b1": torch.bool, "i1": torch.int8, "i2": torch.int16, "i4": torch.int32, "i8": torch.int64,
    "u1": torch.uint8, "u2": torch.uint16, "u4": torch.uint32, "u8": torch.uint64,
    "f2": torch.float16, "f4": torch.float32, "f8": torch.float64,
}  # fmt: skip


class _NumpyType:
    """Stands for a ``numpy.dtype``."""

    def __init__(self, name: Any = None, *_: Any) -> None:
        self.dtype = _NUMPY_TYPES.get(name) if isinstance(name, str) else None
        self.name = str(name)

    def __setstate__(self, state: Any) -> None:
        if state[1] == ">":
            self.dtype = None  # big-endian

    def tensor(self, shape: Any, content: Any) -> torch.Tensor:
        if self.dtype is None or not isinstance(content, bytes):
            raise ObjectRefused(f"numpy.ndarray of {self.name}")
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise ObjectRefused("numpy.ndarray without a shape")
        if math.prod(shape) * self.dtype.itemsize != len(content):
            raise ObjectRefused("numpy.ndarray that is not as large as its shape says")
        if not content:
            return torch.empty(shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(content), dtype=self.dtype).reshape(shape)


class _NumpyArray:
    """Stands for a ``numpy.ndarray``; in the end :func:`handed_out` puts its tensor in its place."""

    tensor: torch.Tensor | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, fortran, content = state
        if not isinstance(kind, _NumpyType):
            raise ObjectRefused("numpy.ndarray without a type")
        if fortran:
            self.tensor = kind.tensor(shape[::-1], content)
            self.tensor = self.tensor.permute(*reversed(range(len(shape))))
        else:
            self.tensor = kind.tensor(shape, content)


def _new_numpy_array(*_: Any) -> _NumpyArray:
    return _NumpyArray()


def _numpy_scalar(kind: Any, content: Any) -> Any:
    if not isinstance(kind, _NumpyType):
        raise ObjectRefused("numpy scalar without a type")
    return kind.tensor((), content).item()


def _latin1(text: Any, encoding: Any = None) -> bytes:
    """How protocol 2 writes bytes: ``_codecs.encode(text, "latin1")``."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ObjectRefused("_codecs.encode")
    return text.encode("latin1")


def _no_bytes(*content: Any) -> bytes:
    """How protocol 2 writes bytes of which there are none: ``bytes()``."""
    if content:
        raise ObjectRefused("bytes of a stated number")
    return b""


_DATA_GLOBALS: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("_codecs", "encode"): _latin1,
    ("__builtin__", "bytes"): _no_bytes,
    ("builtins", "bytes"): _no_bytes,
    ("numpy", "ndarray"): _NumpyArray,
    ("numpy", "dtype"): _NumpyType,
    **{
        (f"numpy.{core}.multiarray", name): stub
        for core in ("core", "_core")
        for name, stub in (("_reconstruct", _new_numpy_array), ("scalar", _numpy_scalar))
    },
}

_LEFT_OUT = (b"\x96", pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.LONG4, pickle.LONG, pickle.INT)


class Inert(pickle._Unpickler):
    """The unpickler in pure Python, reduced to data: no class is ever looked up.

    The one in C sizes its memo by a number in the file; here the memo is a dict. BYTEARRAY8 also takes memory first
    and reads afterwards, so it is left out, like the extension registry, which names classes by number, and integers
    of more than 255 bytes or as text, which Python refuses to print.
    """

    # Of the unpickler in Python; typeshed knows only the one in C.
    stack: list[Any]
    memo: dict[int, Any]
    append: Callable[[Any], None]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: handler for code, handler in pickle._Unpickler.dispatch.items() if bytes([code]) not in _LEFT_OUT
    }

    def __init__(self, file: Any, path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _DATA_GLOBALS:
            return _DATA_GLOBALS[module, name]
        if is_reference_class(f"{module}.{name}"):
            return TensorReference.named(f"{module}.{name}", self.path)
        raise ObjectRefused(f"{module}.{name}")

    def load_build(self) -> None:
        state = self.stack.pop()
        value = self.stack[-1]
        if not isinstance(value, (_NumpyArray, _NumpyType, TensorReference)):
            raise self.unknown_state(f"{type(value).__name__} with a state")
        try:
            value.__setstate__(state)
        except ValueError:
            if isinstance(value, TensorReference):
                raise ObjectRefused(value.class_path) from None
            raise

    dispatch[pickle.BUILD[0]] = load_build
    unknown_state: ClassVar[type[Exception]] = ObjectRefused


def load_plain(path: Path) -> Any:
    """Load a plain pickle that holds only data: dicts, lists, tuples, strings, numbers, NumPy arrays as tensors.

    Raises:
        ObjectRefused: it asks for a class or function. None was looked up.
        Exception: whatever a damaged pickle makes the unpickler raise.
    """
    return handed_out(Inert(io.BytesIO(path.read_bytes()), path).load())


# --- torch.save's archives ---

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

_STORAGE_TYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
# Types that came after the storage classes: torch writes their storages as bytes, and the type beside the tensor.
_BYTE_STORAGE = "UntypedStorage"
_NEW_TYPES = {
    name: found
    for name in (
        "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if isinstance(found := getattr(torch, name, None), torch.dtype)
}  # fmt: skip


def _rebuilt(
    most: int, base: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, flags: Any = None
) -> torch.Tensor | UnreadTensor:
    """Stands for the function that rebuilds a tensor; called with what the file says. ``most``: bytes that it may
    have."""
    numbers = (offset, *size, *stride)
    if not isinstance(base, torch.Tensor) or requires_grad is True or hooks or len(size) != len(stride):
        raise UnsupportedPickle("tensor")
    if flags:
        # Such as that the values in the file are those of the negative.
        raise UnsupportedPickle("tensor with flags")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise UnsupportedPickle("tensor")
    if size == (len(base),) and stride == (1,) and offset == 0:
        return base
    if 0 not in size:
        if math.prod(size) * base.element_size() > most:
            # Valid for torch, but anybody who reads it would take that much memory.
            return UnreadTensor("view that repeats its elements", size)
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if last >= len(base):
            raise UnsupportedPickle("tensor outside of its storage")
    return base.as_strided(size, stride, offset)


def _rebuilt_from_bytes(
    most: int,
    base: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    flags: Any = None,
) -> torch.Tensor | UnreadTensor:
    """The same for a tensor of a newer type."""
    if not isinstance(base, torch.Tensor) or not isinstance(dtype, torch.dtype) or len(base) % dtype.itemsize:
        raise UnsupportedPickle("tensor")
    if dtype not in _NEW_TYPES.values():
        return UnreadTensor(f"tensor of {str(dtype).removeprefix('torch.')}", size if isinstance(size, tuple) else None)
    return _rebuilt(most, base.view(dtype), offset, size, stride, requires_grad, hooks, flags)


def _unread_sparse(layout: Any, data: Any) -> UnreadTensor:
    """torch gives the layout, and a tuple of which the one before the last is the shape."""
    sizes = [part for part in data if isinstance(part, tuple)] if isinstance(data, tuple) else []
    return UnreadTensor(f"{str(layout).removeprefix('torch.')} tensor", sizes[0] if sizes else None)


def _unread_quantized(_base: Any, _offset: Any, size: Any, *_rest: Any) -> UnreadTensor:
    return UnreadTensor("quantized tensor", size if isinstance(size, tuple) else None)


def _as_set(items: Any = ()) -> Any:
    try:
        return set(items)
    except TypeError:  # of what cannot be in a set here
        return list(items)


class _NamedParts(tuple[Any, ...]):
    """Stands for a named tuple."""

    def __new__(cls, *parts: Any) -> _NamedParts:
        return super().__new__(cls, parts)


# What makes an unread tensor is called; what only describes one is its name.
_UNREAD: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_sparse_tensor"): _unread_sparse,
    ("torch._utils", "_rebuild_qtensor"): _unread_quantized,
    ("torch._utils", "_rebuild_nested_tensor"): lambda *_parts: UnreadTensor("nested tensor"),
    ("torch._tensor", "_rebuild_from_type_v2"): lambda *_parts: UnreadTensor("tensor subclass"),
    ("torch.serialization", "_get_layout"): lambda name: name,
    ("torch.nested._internal.nested_tensor", "NestedTensor"): "NestedTensor",
    ("torch.nested._internal.nested_tensor", "_rebuild_njt"): "_rebuild_njt",
    ("torch._dynamo.decorators", "_DimRange"): _NamedParts,
    ("torch", "Tensor"): "Tensor",
    ("torch", "Size"): tuple,
    ("torch", "per_tensor_affine"): "per_tensor_affine",
    ("torch", "per_channel_affine"): "per_channel_affine",
    **{(module, "set"): _as_set for module in ("__builtin__", "builtins")},
    **{(module, "complex"): complex for module in ("__builtin__", "builtins")},
    ("torch", "device"): lambda *parts: ":".join(map(str, parts)),
}
_QUANTIZED_STORAGES = {"QInt8Storage": torch.int8, "QUInt8Storage": torch.uint8, "QInt32Storage": torch.int32}


def load_archive(path: Path, archive: Archive, *, compact: bool) -> tuple[Any, Callable[[], None]]:
    """Load the object in a file that torch.save wrote, tensors memory-mapped.

    Args:
        path: the file.
        archive: where its records are.
        compact: give long lists of ints as int32 tensors and long lists of floats as float64 tensors;
            :func:`was_list` knows them.

    Returns:
        The object, and a function that gives back the memory of what was read of it; it is read again where it is
        needed. Changes that were made in place are lost with it.

    Raises:
        UnsupportedPickle: anything but tensors of the usual types, plain values, dicts, lists and tuples; or damage.
        ObjectRefused: it asks for a class or function. None was looked up.
        DumpFormatError: a record is not where the archive says.
    """
    with open(path, "rb") as file:
        # Copy on write: a tensor may be changed in place, and the file stays as it is.
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        order = archive.records.get("byteorder")
        if order is not None and content[slice(*record_bounds(path, content, order))] != b"little":
            raise UnsupportedPickle("byte order")
        found = handed_out(_Mapped(path, content, archive, compact=compact).load())
    except _DAMAGE as error:
        if isinstance(error, DumpFormatError):
            raise
        raise UnsupportedPickle(f"damage ({type(error).__name__})") from error
    _give_back(content)
    return found, lambda: _give_back(content)


def was_list(value: Any) -> bool:
    """Whether a tensor is a list in its file, loaded with ``compact``."""
    return isinstance(value, torch.Tensor) and getattr(value, _LIST_MARK, False)


_LIST_MARK = "_slime_instrument_was_list"


def handed_out(payload: Any) -> Any:
    """The payload with tensors in the place of NumPy's arrays, and of the arrays that the unpicklers work with."""
    done: dict[int, Any] = {}

    def converted(value: Any) -> Any:
        if isinstance(value, array):
            if id(value) not in done:
                dtype = torch.int32 if value.typecode == "i" else torch.float64
                done[id(value)] = torch.frombuffer(value, dtype=dtype)
                setattr(done[id(value)], _LIST_MARK, True)
            return done[id(value)]
        if isinstance(value, _NumpyArray):
            if value.tensor is None:
                raise ObjectRefused("numpy.ndarray without values")
            return value.tensor
        if isinstance(value, _NumpyType):
            raise ObjectRefused("numpy.dtype")
        if isinstance(value, TensorReference) and not value.state:
            raise ObjectRefused(value.class_path)
        if type(value).__module__ == "numpy":  # from the unpickler for trusted files
            return _from_numpy(value)
        if isinstance(value, tuple):
            parts = tuple(map(converted, value))
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
        if isinstance(value, (dict, list)) and id(value) not in done:
            done[id(value)] = value
            pending.append(value)
        return value

    pending: list[Any] = []
    payload = converted(payload)
    while pending:
        value = pending.pop()
        for key, item in list(value.items()) if isinstance(value, dict) else enumerate(value):
            if type(item) not in _SCALARS:
                value[key] = converted(item)
    return payload


def _from_numpy(value: Any) -> Any:
    """A NumPy array as a tensor, where torch has its type, else as a list; a NumPy scalar as a number."""
    if hasattr(value, "item") and not getattr(value, "shape", ()):
        return value.item()
    try:
        return torch.from_numpy(value.copy())
    except (TypeError, AttributeError, RuntimeError, ValueError):
        return value.tolist() if hasattr(value, "tolist") else value


_SCALARS = frozenset({int, float, str, bool, type(None), bytes, torch.Tensor})


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

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        code: handler for code, handler in Inert.dispatch.items() if bytes([code]) not in _NOT_WRITTEN
    }
    unknown_state = UnsupportedPickle

    def __init__(self, path: Path, content: mmap.mmap, archive: Archive, *, compact: bool) -> None:
        self.start, self.end = record_bounds(path, content, archive.pickle)
        content.seek(self.start)
        super().__init__(content, path)
        self.content, self.records, self.compact = content, archive.records, compact
        self.storages: dict[str, torch.Tensor] = {}
        self.keys: dict[int, int] = {}
        """id of an array -> its number in the memo, which keeps it alive."""
        self.shared: set[int] = set()
        """ids of arrays that stand in several places."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return functools.partial(_rebuilt if name.endswith("2") else _rebuilt_from_bytes, len(self.content))
        if module == "torch" and name in _STORAGE_TYPES:
            return _STORAGE_TYPES[name]
        if (module, name) == ("torch.storage", _BYTE_STORAGE):
            return torch.uint8
        if module == "torch" and name in _NEW_TYPES:
            return _NEW_TYPES[name]
        if (module, name) in _DATA_GLOBALS:
            return _DATA_GLOBALS[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module == "torch" and name in _QUANTIZED_STORAGES:
            return _QUANTIZED_STORAGES[name]
        if (module, name) in _UNREAD:
            return _UNREAD[module, name]
        if is_reference_class(f"{module}.{name}"):
            return TensorReference.named(f"{module}.{name}", self.path)
        raise UnsupportedPickle(f"{module}.{name}")

    def persistent_load(self, saved_id: Any) -> torch.Tensor:
        _, kind, key, _, numel = saved_id
        if not isinstance(kind, torch.dtype) or type(key) is not str or type(numel) is not int or numel < 0:
            raise UnsupportedPickle("storage")
        if key not in self.storages:
            if len(self.storages) % _HELD == _HELD - 1:
                # Each look at the head of a record brings its neighbourhood into memory; together that is the file.
                _give_back(self.content)
            start, end = record_bounds(self.path, self.content, self.records[f"data/{key}"])
            if numel * kind.itemsize > end - start:
                raise UnsupportedPickle("storage larger than its record")
            self.storages[key] = (
                torch.frombuffer(self.content, dtype=kind, count=numel, offset=start)
                if numel
                else torch.empty(0, dtype=kind)
            )
        found = self.storages[key]
        if found.dtype != kind or len(found) != numel:
            raise UnsupportedPickle("storage of two types")
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

    def _as_list(self, numbers: array[Any]) -> list[Any]:
        """Turn an array back into the list that it stands for, on the stack and in the memo."""
        if id(numbers) in self.shared:
            raise UnsupportedPickle("a list that grows after it was used")
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


def forgiving_pickle(path: Path) -> Any:
    """What ``torch.load(pickle_module=...)`` takes: the ordinary unpickler, for a file that the user trusts. A class
    that is not installed becomes :class:`Opaque`."""

    class Forgiving(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if is_reference_class(f"{module}.{name}"):
                return TensorReference.named(f"{module}.{name}", path)
            try:
                return super().find_class(module, name)
            except (ImportError, AttributeError):
                return type(name.rpartition(".")[2], (Opaque,), {"qualified_name": f"{module}.{name}"})

    def load(file: BinaryIO, **options: Any) -> Any:
        return Forgiving(file, **options).load()

    return SimpleNamespace(Unpickler=Forgiving, load=load, __name__="slime_instrument.forgiving_pickle")
