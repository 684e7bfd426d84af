"""Values of a dump as one-dimensional tensors: Python lists, lists with None, tensors of any type."""

from __future__ import annotations

import math
from array import array
from typing import Any

import torch

__all__ = ["integers", "log_probs"]

_DTYPES = {"i": torch.int32, "d": torch.float64}  # of what load_dump(compact=True) gives
# What Python and torch raise for entries that are no numbers, too large, or tensors of several values.
_NO_NUMBERS = (TypeError, ValueError, OverflowError, RuntimeError)


def log_probs(value: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Log-probs as float32, shape ``(n,)``, and which of them are None (a bool mask, or None where none is).

    float32 loses nothing: it is what both engines compute in. None for a value that is no sequence of numbers.
    """
    if isinstance(value, torch.Tensor):
        if value.dim() != 1 or value.is_complex():
            return None
        return value.detach().to(torch.float32), None
    if isinstance(value, array) and value:
        return torch.frombuffer(value, dtype=_DTYPES[value.typecode]).to(torch.float32), None
    if not isinstance(value, (list, tuple, array)):
        return None
    if not value:
        return torch.empty(0), None
    try:
        # array is several times faster than torch.tensor on a list of Python floats.
        return torch.frombuffer(array("d", value), dtype=torch.float64).to(torch.float32), None
    except _NO_NUMBERS:
        pass
    missing = torch.tensor([item is None for item in value])
    try:
        numbers = [math.nan if item is None else float(item) for item in value]
    except _NO_NUMBERS:
        return None
    return torch.tensor(numbers, dtype=torch.float64).to(torch.float32), missing if bool(missing.any()) else None


def integers(value: Any) -> torch.Tensor | None:
    """Whole numbers as int64, shape ``(n,)``; None for anything else. Booleans count as 0 and 1."""
    if isinstance(value, torch.Tensor):
        if value.dim() != 1 or value.is_complex():
            return None
        if value.is_floating_point():
            exact = value.detach().double()  # the shortest types cannot be rounded
            if not bool((exact == exact.round()).all()):
                return None
        return value.detach().to(torch.int64)
    if isinstance(value, array) and value.typecode == "i" and value:
        return torch.frombuffer(value, dtype=torch.int32).to(torch.int64)
    if not isinstance(value, (list, tuple, array)):
        return None
    if not value:
        return torch.empty(0, dtype=torch.int64)
    try:
        return torch.frombuffer(array("q", value), dtype=torch.int64)
    except _NO_NUMBERS:
        pass
    try:
        numbers = [int(item) for item in value]
        return torch.frombuffer(array("q", numbers), dtype=torch.int64) if numbers == list(value) else None
    except _NO_NUMBERS:
        return None
