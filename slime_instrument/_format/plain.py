"""Values of a dump as plain Python values that strict JSON can hold."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = ["NonFinite", "plain_value"]

_DEEPEST = 128  # no dump is; a trusted pickle can hold a list that contains itself


@dataclass
class NonFinite:
    """How many values of a field JSON has no number for. Each of them stands as null."""

    nan: int = 0
    inf: int = 0
    negative_inf: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def add(self, value: float) -> None:
        """Count one value that is not finite."""
        if math.isnan(value):
            self.nan += 1
        elif value > 0:
            self.inf += 1
        else:
            self.negative_inf += 1


def plain_value(value: Any, counts: dict[str, NonFinite] | None = None, name: str = "") -> Any:
    """Turn a value into dicts, lists, strings, numbers, bools and None.

    Args:
        value: anything. Tensors become lists, whatever their type; objects become ``<module.Class>``.
        counts: takes up, under ``name``, how many values were not finite and are None in the result.
        name: the field that the value belongs to.
    """
    return _plain(value, counts, name, 0)


def _plain(value: Any, counts: dict[str, NonFinite] | None, name: str, depth: int) -> Any:
    if depth > _DEEPEST:
        return "<nested too deep>"
    if isinstance(value, torch.Tensor):
        return _plain(value.detach().tolist(), counts, name, depth)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        if counts is not None:
            counts.setdefault(name, NonFinite()).add(value)
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, counts, name, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple, array, set, frozenset)):
        return [_plain(item, counts, name, depth + 1) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, complex):
        return str(value)
    item = getattr(value, "item", None)
    if callable(item) and not getattr(value, "shape", None):
        return _plain(item(), counts, name, depth + 1)  # a NumPy scalar
    kind = type(value)
    return f"<{getattr(value, 'qualified_name', '') or f'{kind.__module__}.{kind.__qualname__}'}>"
