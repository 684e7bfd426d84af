"""Small questions about values that may be tensors, lists or anything else a damaged dump holds."""

from __future__ import annotations

from array import array
from typing import Any

import torch

__all__ = [
    "as_ints",
    "as_list",
    "holds_whole_numbers",
    "is_whole_number",
    "length_of",
    "nan_indices",
    "show",
    "whole_number",
]


def is_whole_number(value: Any) -> bool:
    """An int, or a 0-d tensor of an integer type; never a bool."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_floating_point() and value.dtype is not torch.bool
    return isinstance(value, int) and not isinstance(value, bool)


def whole_number(value: Any) -> int | None:
    """The value as an int, or None if it is no whole number."""
    return int(value) if is_whole_number(value) else None


def number(value: Any) -> float | None:
    """An int, a float or a tensor of one element as a float; None for anything else."""
    if isinstance(value, torch.Tensor):
        return float(value.item()) if value.numel() == 1 and not value.is_complex() else None
    return float(value) if isinstance(value, (int, float)) else None


def sum_of(values: Any) -> float | None:
    """Sum of a tensor or list of numbers; None if it holds anything else."""
    if isinstance(values, torch.Tensor):
        return None if values.is_complex() else float(values.sum().item())
    if not isinstance(values, (list, tuple, array)):
        return None
    numbers = [item for value in values if (item := number(value)) is not None]
    return sum(numbers) if len(numbers) == len(values) else None


def length_of(value: Any) -> int | None:
    """Entries along the first dimension; None for what has none."""
    if isinstance(value, torch.Tensor):
        return int(value.shape[0]) if value.dim() else None
    return len(value) if isinstance(value, (list, tuple, array)) else None


def as_list(value: Any) -> list[Any] | None:
    """A list, tuple or 1-d tensor as a list; None for anything else."""
    if isinstance(value, torch.Tensor):
        return list(value.tolist()) if value.dim() == 1 else None
    return list(value) if isinstance(value, (list, tuple, array)) else None


def as_ints(value: Any) -> list[int] | None:
    """Like :func:`as_list`, and None unless every entry is a whole number."""
    if not holds_whole_numbers(value):
        return None
    return [int(item) for item in as_list(value) or ()]


def holds_whole_numbers(value: Any) -> bool:
    """Whether a list or 1-d tensor holds whole numbers only. A tensor says so by its type; its values stay unread."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 1 and not value.is_floating_point() and value.dtype is not torch.bool
    return isinstance(value, (list, tuple, array)) and all(is_whole_number(item) for item in value)


def nan_indices(value: Any) -> list[int]:
    """Where a tensor or list of numbers is NaN, along the first dimension."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point() or not value.dim():
            return []
        flat = value.reshape(value.shape[0], -1).isnan().any(dim=1) if value.numel() else value.new_zeros(0)
        return [int(index) for index in flat.nonzero().flatten()]
    if isinstance(value, (list, tuple, array)):
        return [index for index, item in enumerate(value) if isinstance(item, float) and item != item]
    return []


def show(values: list[Any], limit: int = 8) -> str:
    """The first few of many, for a message."""
    shown = ", ".join(str(value) for value in values[:limit])
    return shown if len(values) <= limit else f"{shown}, … ({len(values)} in all)"
