"""References to tensors that slime leaves in files of their own.

Since 2026-08 slime may spill large per-sample tensors, such as routed experts, to safetensors files, and hand on a
small object that says where they are (``DiskTensorRef``). Dumps keep that object, and hard-link its file to
``<stem>_r3_spill/<uuid>/`` beside themselves. Here a reader without slime finds shape, type and file of each, and
training learns which objects they are; nothing is read before somebody asks for it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch

from slime_instrument._errors import DumpFormatError

SPILL_SUFFIX = "_r3_spill"
"""Behind the stem of a dump's name: the folder of the files that it refers to."""

# slime's own modules of different dates, under whatever name a fork gave to the package.
_CLASSES = re.compile(r"\w+\.(?:utils\.tensor_store|data\.tensor)\.(DiskTensorRef|TensorRef)")
_PLAIN = frozenset({type(None), bool, int, float, str})
_OF_STRAW = "straw.tensor.TensorRef"  # of the queue that slime may keep its rollouts in


def is_reference_class(qualified_name: str) -> bool:
    """Whether a class is one of slime's references to a file."""
    return qualified_name == _OF_STRAW or _CLASSES.fullmatch(qualified_name) is not None


@functools.lru_cache(maxsize=256)  # asked of every value of a dump
def fate(kind: Any) -> Literal["kept", "written out"] | None:
    """What slime's dumps do with objects of a class: keep them, with their file linked beside the dump; or hold the
    tensors that their ``load()`` gives, because their files are short-lived. None for what is no reference."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    found = _CLASSES.fullmatch(name)
    if found is not None and found[1] == "DiskTensorRef":
        return "kept"
    return "written out" if is_reference_class(name) else None


class TensorReference:
    """Stands for a tensor in a file of its own. Made by the readers, as a subclass for each class that a dump names.

    Attributes:
        class_path: slime's class, as the dump names it.
        dump: the dump that holds the reference.
        state: everything that the dump says of it.
    """

    class_path: ClassVar[str] = ""
    dump: ClassVar[Path] = Path()
    state: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def named(cls, class_path: str, dump: Path) -> type[TensorReference]:
        """The class whose objects stand for those of ``class_path`` in ``dump``."""
        return type("TensorReference", (cls,), {"class_path": class_path, "dump": dump})

    def __setstate__(self, state: Any) -> None:
        """Called by the unpicklers. ValueError where it lacks path, shape, type or size, or has no plain values."""
        if not isinstance(state, dict):
            raise ValueError("reference without a state")
        plain = dict(state)  # what the rest of the file does to its own dict is no concern of ours
        shape = plain.get("shape")
        sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (None,)
        if not isinstance(plain.get("path"), str) or not isinstance(plain.get("dtype"), str) or "\0" in plain["path"]:
            raise ValueError("reference without a file")
        if not all(type(size) is int and 0 <= size < 2**63 for size in (*sizes, plain.get("nbytes"))):
            raise ValueError("reference without a shape")
        plain["shape"] = sizes
        others = (value for name, value in plain.items() if name != "shape")
        if not all(type(name) is str for name in plain) or not all(type(value) in _PLAIN for value in others):
            raise ValueError("reference with more than plain values")
        self.state = plain

    @property
    def path(self) -> str:
        """The file, as it was when the dump was written."""
        return str(self.state["path"])

    @property
    def shape(self) -> tuple[int, ...]:
        found: tuple[int, ...] = self.state["shape"]
        return found

    @property
    def dtype(self) -> str:
        """torch's name of it, without ``torch.``"""
        return str(self.state["dtype"])

    @property
    def file(self) -> Path | None:
        """The file as it is found now: where the dump says, else beside the dump, which may have been moved or renamed.
        None where it is gone."""
        stored = Path(self.path)
        places = [stored]
        if len(stored.parts) > 2 and stored.parts[-3].endswith(SPILL_SUFFIX):
            below = stored.parts[-2:]
            folders = (stored.parts[-3], self.dump.stem + SPILL_SUFFIX)
            places += [self.dump.parent.joinpath(folder, *below) for folder in folders]
        return next((place.absolute() for place in places if _is_file(place)), None)

    def load(self) -> torch.Tensor:
        """The tensor.

        Raises:
            DumpFormatError: its file is gone, holds another tensor, or safetensors is not installed. One line.
        """
        file = self.file
        if file is None:
            raise self._refusal("is gone", "Everything else in the dump can be read.")
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise self._refusal("needs safetensors", "install slime-instrument[analysis]") from None
        try:
            with safe_open(file, framework="pt", device="cpu") as content:
                whole = content.get_slice("tensor")
                if tuple(whole.get_shape()) != self.shape:
                    raise self._refusal(f"has shape {tuple(whole.get_shape())}, not {self.shape}")
                found: torch.Tensor = content.get_tensor("tensor")
        except (SafetensorError, OSError) as error:
            raise self._refusal(f"cannot be read ({str(error).splitlines()[0]})") from None
        if str(found.dtype) != f"torch.{self.dtype}":
            raise self._refusal(f"holds {found.dtype}, not torch.{self.dtype}")
        return found

    def _refusal(self, found: str, next_step: str = "") -> DumpFormatError:
        return DumpFormatError(f"{self.path}: {found}. {self.dump} refers to it. {next_step}".rstrip())

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<{self.dtype} tensor of shape {self.shape} in {self.path}>"


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that no file can have
        return False


@dataclass(frozen=True)
class ReferenceCounts:
    """The references in some samples.

    Attributes:
        total: how many there are.
        missing: how many have no file any more.
        first_missing: the file of the first of those, as the dump says it.
    """

    total: int
    missing: int
    first_missing: str | None

    def __str__(self) -> str:
        text = f"{self.total} tensors in files of their own"
        return f"{text}, {self.missing} of which are gone (first: {self.first_missing})" if self.missing else text

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def references_in(samples: Iterable[Mapping[Any, Any]]) -> Iterator[tuple[Any, TensorReference]]:
    """Field and reference, for each one that is a sample's value."""
    for sample in samples:
        for name, value in sample.items():
            if isinstance(value, TensorReference):
                yield name, value


def count_references(samples: Iterable[Mapping[Any, Any]]) -> ReferenceCounts:
    """How many references there are, and how many of their files are gone."""
    found = [reference for _, reference in references_in(samples)]
    missing = [reference.path for reference in found if reference.file is None]
    return ReferenceCounts(len(found), len(missing), missing[0] if missing else None)


__all__ = [
    "SPILL_SUFFIX",
    "ReferenceCounts",
    "TensorReference",
    "count_references",
    "fate",
    "is_reference_class",
    "references_in",
]
