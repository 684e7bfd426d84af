"""Small questions about values that may be tensors, lists or anything else a damaged dump holds."""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Collection
from typing import Any

import torch

from slime_instrument._format.plain import plain_value

__all__ = [
    "as_ints",
    "as_list",
    "brief",
    "equal_values",
    "gaps",
    "holds_whole_numbers",
    "is_whole_number",
    "length_of",
    "nan_indices",
    "number",
    "show",
    "sum_of",
    "truth",
    "whole_number",
    "whole_number_in",
]

_BITS = 63  # of the largest count or id; a larger number is damage, and no tensor could take it


def is_whole_number(value: Any) -> bool:
    """An int of 64 bits, or a 0-d tensor of an integer type; never a bool."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and _is_integral(value) and int(value.item()).bit_length() <= _BITS
    return isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= _BITS


def whole_number(value: Any) -> int | None:
    """The value as an int, or None if it is no whole number."""
    return int(value) if is_whole_number(value) else None


def whole_number_in(text: str) -> int | None:
    """The whole number that a string spells in ASCII digits; None for any other string."""
    found = re.fullmatch(r"\s*(-?[0-9]{1,18})\s*", text)
    return int(found[1]) if found is not None else None


def number(value: Any) -> float | None:
    """An int, a float or a tensor of one element as a float; None for anything else and for what no float holds."""
    if isinstance(value, torch.Tensor):
        return float(value.item()) if value.numel() == 1 and not value.is_complex() else None
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:
        return None


def truth(value: Any) -> bool:
    """Whether a flag is set; not if it is something that is neither true nor false, such as a tensor of several."""
    try:
        return bool(value)
    except RuntimeError:
        return False


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
        return value.dim() == 1 and _is_integral(value)
    if isinstance(value, array):
        return value.typecode == "i" or not value
    return isinstance(value, (list, tuple)) and all(is_whole_number(item) for item in value)


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


def equal_values(one: Any, other: Any) -> bool:
    """Whether two values of any kind hold the same, a tensor and a list of its values included."""
    return bool(plain_value(one) == plain_value(other))


def gaps(known: Collection[int], end: int, most: int = 100_000) -> list[int]:
    """Numbers from 0 up to ``end`` that are not ``known``; the first ``most``, because ``end`` may be anything."""
    return list(itertools.islice((number for number in range(end) if number not in known), most))


def brief(value: Any) -> str:
    """A value for a message: in one line and not long."""
    text = str(plain_value(value))
    return text if len(text) <= 80 else f"{text[:80]}…"


def show(values: list[Any], limit: int = 8) -> str:
    """The first few of many, for a message."""
    shown = ", ".join(str(value) for value in values[:limit])
    return shown if len(values) <= limit else f"{shown}, … ({len(values)} in all)"


def _is_integral(value: torch.Tensor) -> bool:
    return not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
