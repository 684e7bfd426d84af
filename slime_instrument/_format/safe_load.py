"""Load a dump file without running anything that is in it.

Sizes that the file declares are compared with what it holds before memory is taken; tensors stay memory-mapped.
Objects of arbitrary classes are refused by name; ``allow_pickle=True`` is the opt-in, for rollout dumps only.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Sized
from pathlib import Path
from typing import Any

import torch

from slime_instrument._errors import DumpFormatError
from slime_instrument._format import unpickling
from slime_instrument._format.containers import Container, examine, looks_like_train_dump, unusable

_SCALARS = frozenset({int, float, str, bool, type(None), bytes})
_MAX_DEPTH = 64
_MOST_UNFOLDED = 256  # values per byte of the file; what the samples of one prompt share is far below


def load_dump(path: str | Path, *, allow_pickle: bool = False, compact: bool = False) -> Any:
    """Load the object that a dump file holds. Arguments and errors as for :func:`open_dump`."""
    return open_dump(path, allow_pickle=allow_pickle, compact=compact)[0]


def open_dump(path: str | Path, *, allow_pickle: bool = False, compact: bool = False) -> tuple[Any, Callable[[], None]]:
    """Load the object that a dump file holds, tensors on the CPU and memory-mapped where the file allows it.

    Args:
        path: a train dump, a rollout dump, or anything: what cannot be read safely is refused.
        allow_pickle: for rollout dumps that hold objects of arbitrary classes. Loading those can run code from the
            file. Classes that are not installed become :class:`~slime_instrument._format.unpickling.Opaque`. The safe
            way is tried first, and train dumps never go any other.
        compact: give long lists of ints as int32 tensors and long lists of floats as float64 tensors: a fraction of
            the memory. :func:`~slime_instrument._format.unpickling.was_list` knows them.

    Returns:
        The object, and a function that gives back the memory of what was read of its mapped tensors. They are read
        again where they are needed; changes that were made in place are lost.

    Raises:
        DumpFormatError: cut, empty, foreign or hostile file, or objects without ``allow_pickle``. One line.
        OSError: the file is missing or may not be read.
    """
    path = Path(path)
    container = examine(path)
    try:
        return _load_safely(path, container, compact)
    except unpickling.ObjectRefused as refused:
        if looks_like_train_dump(container):
            raise unusable(
                path,
                f"holds an object of class {refused}",
                next_step="A train dump holds tensors and plain values only.",
            ) from None
        if not allow_pickle:
            raise unusable(
                path,
                f"holds an object of class {refused}, which the safe loader does not create",
                next_step="If you trust the file: --allow-pickle (allow_pickle=True); this can run code from it.",
            ) from None
    return _load_trusted(path, container), lambda: None


def _load_safely(path: Path, container: Container, compact: bool) -> tuple[Any, Callable[[], None]]:
    # The values of NumPy arrays are in the pickle; torch's loader knows none.
    most = container.size
    give_back: Callable[[], None] = lambda: None  # noqa: E731
    try:
        if container.archive is None:
            payload = unpickling.load_plain(path)
        else:
            try:
                payload, give_back = unpickling.load_archive(path, container.archive, compact=compact)
            except unpickling.UnsupportedPickle:
                if container.allocating_global is not None:
                    raise unpickling.ObjectRefused(container.allocating_global) from None
                most = container.tensor_bytes
                # torch's own loader has the last word, and says in its own words what is wrong.
                with _quiet(), _no_other_classes():
                    payload = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (unpickling.ObjectRefused, DumpFormatError, OSError):
        raise
    except pickle.UnpicklingError as error:
        names = _refused_classes(error)
        if names:
            raise unpickling.ObjectRefused(names) from None
        raise unusable(path, f"is damaged ({_reason(error)})") from None
    # A damaged or hostile file can make the readers raise anything at all; each such file is one line, no traceback.
    except Exception as error:
        raise unusable(path, f"is damaged ({_reason(error)})") from None
    _check_tensors(path, payload, container, most)
    return payload, give_back


def _load_trusted(path: Path, container: Container) -> Any:
    try:
        if container.kind == "pickle":
            with open(path, "rb") as file:
                return unpickling.handed_out(unpickling.forgiving_pickle(path).load(file))
        with _quiet():
            payload = torch.load(
                path,
                map_location="cpu",
                weights_only=False,
                mmap=container.kind == "zip",
                pickle_module=unpickling.forgiving_pickle(path),
            )
        return unpickling.handed_out(payload)
    except OSError:
        raise
    except Exception as error:
        raise unusable(path, f"cannot be unpickled ({_reason(error)})") from None


def _refused_classes(error: pickle.UnpicklingError) -> str:
    """The class names in torch's refusal; empty if it was refused for another reason."""
    found = re.search(r"GLOBAL (\S+) was not|unsupported GLOBAL (\S+) whose|Unsupported class (\S+)", str(error))
    return next((name for name in found.groups() if name), "") if found is not None else ""


def _reason(error: BaseException) -> str:
    """One line of a reader's error, without torch's advice to load the file unsafely."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    own = (line.partition("WeightsUnpickler error:")[2].strip() for line in lines)
    line = next((line for line in own if line), lines[0] if lines else "")
    if not line or line.startswith("Weights only load failed"):
        return type(error).__name__
    return line[:160]


def _check_tensors(path: Path, payload: Any, container: Container, most: int) -> None:
    """Refuse tensors that are not plain CPU values, or larger than the file.

    Nothing is read: a mapped tensor costs memory only when somebody touches it, and this is what happens next.
    """
    storages: dict[int, int] = {}
    for value in _walk(path, payload, container):
        if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized:
            raise unusable(path, f"holds a tensor of layout {value.layout} on {value.device}")
        if unpickling.was_list(value):
            continue  # made of numbers that the pickle holds one by one
        declared = value.numel() * value.element_size()
        if declared > container.size:
            # Repeated by stride 0: valid for torch, but anybody who reads it would take that much memory.
            raise unusable(path, f"holds a tensor of {declared} bytes, but the file has {container.size}")
        storage = value.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = max(storage.nbytes(), storages.get(storage.data_ptr(), 0))
    declared = sum(storages.values())
    if declared > most:
        raise unusable(path, f"declares {declared} bytes of tensors, but holds {most}")


def _walk(path: Path, payload: Any, container: Container) -> Iterator[torch.Tensor]:
    """Every tensor in the payload, and a refusal of what could not be written out: parts that hold themselves, and
    lists of lists of the same list, which a small file can unfold into any number of values."""
    known: dict[int, tuple[int, int]] = {}  # of a container: how deep it is, and how many values it unfolds into
    above: set[int] = set()
    pending: list[tuple[Any, list[Any] | None]] = [(payload, None)]
    while pending:
        value, parts = pending.pop()
        if isinstance(value, torch.Tensor):
            if id(value) not in known:
                known[id(value)] = (0, value.numel())
                yield value
            continue
        if parts is None:
            if id(value) in above:
                raise unusable(path, "holds a list or dict that contains itself")
            if id(value) in known:
                continue
            if isinstance(value, dict) and any(hasattr(dict, name) for name in getattr(value, "__dict__", ())):
                raise unusable(path, "holds a dict whose methods are replaced")
            parts = _parts(value)
            if parts:
                above.add(id(value))
                pending.append((value, parts))
                pending.extend((part, None) for part in parts)
                if len(above) > _MAX_DEPTH:
                    raise unusable(path, f"is nested more than {_MAX_DEPTH} deep")
                continue
        above.discard(id(value))
        inside = [known[id(part)] for part in parts]
        depth = 1 + max((depth for depth, _ in inside), default=0)
        size = (len(value) if isinstance(value, Sized) else 1) + sum(size for _, size in inside)
        if depth > _MAX_DEPTH:
            raise unusable(path, f"is nested more than {_MAX_DEPTH} deep")
        if size > _MOST_UNFOLDED * container.size:
            raise unusable(path, f"unfolds into {size} values, but the file has {container.size} bytes")
        known[id(value)] = (depth, size)


def _parts(value: Any) -> list[Any]:
    """What a container holds, apart from plain values."""
    if isinstance(value, dict):
        return [part for pair in dict.items(value) for part in pair if type(part) not in _SCALARS]
    if isinstance(value, (list, tuple, set, frozenset)):
        return [part for part in value if type(part) not in _SCALARS]
    return []


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch warns about its own typed storages while it loads; nobody who reads a dump can act on that."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _no_other_classes() -> Iterator[None]:
    """Libraries add classes to what torch loads safely, for the whole process; Megatron does when it is imported. What
    a dump may hold does not depend on that."""
    added = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        yield
    finally:
        torch.serialization.add_safe_globals(added)
