"""Unpicklers for what torch's safe loader does not serve: plain pickles, old torch files, and opted-in objects."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, ClassVar

__all__ = ["FORGIVING_PICKLE", "Inert", "ObjectRefused", "Opaque", "declared_tensor_bytes", "load_plain"]


class ObjectRefused(Exception):
    """A pickle asks for a class or function that the safe way does not give. ``str()`` is its qualified name."""


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


_LEFT_OUT = (b"\x96", pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.LONG4, pickle.LONG, pickle.INT)


class Inert(pickle._Unpickler):
    """The unpickler in pure Python, reduced to data: no class is ever looked up.

    The one in C sizes its memo by a number in the file; here the memo is a dict. BYTEARRAY8 also takes memory first
    and reads afterwards, so it is left out, like the extension registry, which names classes by number, and integers
    of more than 255 bytes or as text, which Python refuses to print.
    """

    dispatch: ClassVar = {
        code: handler for code, handler in pickle._Unpickler.dispatch.items() if bytes([code]) not in _LEFT_OUT
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise ObjectRefused(f"{module}.{name}")


class _Measuring(Inert):
    """Walks the pickle of an old torch file and adds up the tensor storages that it declares."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self.sizes: dict[str, int] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type(name, (Opaque,), {"qualified_name": f"{module}.{name}"})

    def persistent_load(self, saved_id: Any) -> Any:
        # ("storage", class, key, location, number of elements, view). Bytes per element: at least 1 for any class.
        _, storage_class, key, _, numel, *_ = saved_id
        self.sizes[str(key)] = int(numel) * _ITEM_SIZES.get(getattr(storage_class, "__name__", ""), 1)
        return Opaque()


_ITEM_SIZES = {
    "DoubleStorage": 8,
    "LongStorage": 8,
    "ComplexFloatStorage": 8,
    "ComplexDoubleStorage": 16,
    "FloatStorage": 4,
    "IntStorage": 4,
    "HalfStorage": 2,
    "BFloat16Storage": 2,
    "ShortStorage": 2,
}


def load_plain(path: Path) -> Any:
    """Load a plain pickle that holds only data: dicts, lists, tuples, strings and numbers.

    Raises:
        ObjectRefused: it asks for a class or function. None was looked up.
        Exception: whatever a damaged pickle makes the unpickler raise.
    """
    return Inert(io.BytesIO(path.read_bytes())).load()


def declared_tensor_bytes(path: Path) -> int:
    """Bytes of all tensors that an old torch file declares, found without taking them."""
    stream = io.BytesIO(path.read_bytes())
    for _ in range(3):  # magic number, protocol, machine description
        Inert(stream).load()
    measuring = _Measuring(stream)
    measuring.load()
    return sum(measuring.sizes.values())


class _Forgiving(pickle.Unpickler):
    """The ordinary unpickler, for files that the user trusts: a class that is not installed becomes :class:`Opaque`."""

    def find_class(self, module: str, name: str) -> Any:
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            return type(name.rpartition(".")[2], (Opaque,), {"qualified_name": f"{module}.{name}"})


def _forgiving_load(file: BinaryIO, **options: Any) -> Any:
    return _Forgiving(file, **options).load()


_load: Callable[..., Any] = _forgiving_load
FORGIVING_PICKLE: Any = SimpleNamespace(Unpickler=_Forgiving, load=_load, __name__="slime_instrument.forgiving_pickle")
"""What ``torch.load(pickle_module=...)`` takes."""
