"""Make a value of rollout_data something that the safe loader takes: plain Python, tensors, nothing else."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Converted", "make_plain"]

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})


@dataclass
class Converted:
    """Which fields held objects that had to be written as something else: field -> type names."""

    fields: dict[str, set[str]] = field(default_factory=dict)
    _field: str = ""

    def at(self, name: str) -> Converted:
        return Converted(self.fields, name)

    def note(self, value: Any) -> None:
        kind = type(value)
        self.fields.setdefault(self._field, set()).add(f"{kind.__module__}.{kind.__qualname__}")

    def __bool__(self) -> bool:
        return bool(self.fields)

    def as_dict(self) -> dict[str, list[str]]:
        return {name: sorted(kinds) for name, kinds in self.fields.items()}


def make_plain(value: Any, tensor: Callable[[torch.Tensor], Any], report: Converted) -> Any:
    """``value`` with every tensor replaced by ``tensor(it)`` and every foreign object by a plain one.

    NumPy scalars become Python numbers, NumPy arrays tensors, enums their values; anything else its ``repr``, which
    ``report`` notes: a dump that cannot be loaded safely is worse than one that shows an object as text.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if torch.is_tensor(value):
        return tensor(value)
    if isinstance(value, dict):
        return {_key(key): make_plain(item, tensor, report) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if all(type(item) in _PLAIN for item in value):  # long lists of numbers are the common case
            return tuple(value) if isinstance(value, tuple) else list(value)
        items = [make_plain(item, tensor, report) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        if getattr(value, "shape", None) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
            # A native copy: torch takes no negative strides and no foreign byte order, and warns of read-only memory.
            return tensor(torch.as_tensor(value.astype(value.dtype.newbyteorder("="), order="C", copy=True)))
        listed = value.tolist()
        if type(listed) is not kind:
            return make_plain(listed, tensor, report)
    if isinstance(value, enum.Enum):
        return make_plain(value.value, tensor, report)
    for base in (bool, int, float, str):
        if isinstance(value, base):
            return base(value)
    report.note(value)
    try:
        return repr(value)
    except Exception:
        return f"<{kind.__module__}.{kind.__qualname__}>"


def _key(key: Any) -> Any:
    if type(key) in _PLAIN:
        return key
    if isinstance(key, tuple):
        return tuple(_key(item) for item in key)
    plain = key.value if isinstance(key, enum.Enum) else key.tolist() if type(key).__module__ == "numpy" else key
    return plain if type(plain) in _PLAIN else str(key)
