"""Values of a dump, which may be tensors, lists or anything else that a damaged file holds.

Four families: one number (:func:`whole_number`, :func:`number`, :func:`truth`), several numbers as a list or as a
tensor (:func:`as_list`, :func:`integers`, :func:`log_probs`), anything as JSON (:func:`plain_value`), and values in
messages (:func:`brief`, :func:`show`). None of them raises.
"""

from __future__ import annotations

import itertools
import math
import re
from array import array
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any

import torch

from slime_instrument._format.references import TensorReference

HIGHEST_LOG_PROB = 0.1
"""A value above this is no log-prob: rounding of bf16 logits, at most half of 0.125, cannot lift one that far."""

_BITS = 63  # of the largest count or id; a larger number is damage, and no tensor could take it


def is_whole_number(value: Any) -> bool:
    """An int of 64 bits, or a 0-d tensor of an integer type; never a bool."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and _is_integral(value) and int(value.item()).bit_length() <= _BITS
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, Integral)) and int(value).bit_length() <= _BITS


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
        return float(value) if isinstance(value, Real) else None
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
    if not isinstance(values, (list, tuple)):
        return None
    numbers = [item for value in values if (item := number(value)) is not None]
    return sum(numbers) if len(numbers) == len(values) else None


def length_of(value: Any) -> int | None:
    """Entries along the first dimension; None for what has none."""
    if isinstance(value, (torch.Tensor, TensorReference)):
        return int(value.shape[0]) if value.shape else None
    return len(value) if isinstance(value, (list, tuple)) else None


def as_list(value: Any) -> list[Any] | None:
    """A list, tuple or 1-d tensor as a list; None for anything else."""
    if isinstance(value, torch.Tensor):
        return list(value.tolist()) if value.dim() == 1 else None
    return list(value) if isinstance(value, (list, tuple)) else None


def as_ints(value: Any) -> list[int] | None:
    """Like :func:`as_list`, and None unless every entry is a whole number."""
    if not holds_whole_numbers(value):
        return None
    return [int(item) for item in as_list(value) or ()]


def holds_whole_numbers(value: Any) -> bool:
    """Whether a list or 1-d tensor holds whole numbers only. A tensor says so by its type; its values stay unread."""
    if isinstance(value, torch.Tensor):
        return value.dim() == 1 and _is_integral(value)
    return isinstance(value, (list, tuple)) and all(is_whole_number(item) for item in value)


def nan_indices(value: Any) -> list[int]:
    """Where a tensor or list of numbers is NaN, along the first dimension."""
    if isinstance(value, torch.Tensor):
        if not value.is_floating_point() or not value.dim():
            return []
        flat = value.float().reshape(value.shape[0], -1).isnan().any(dim=1) if value.numel() else value.new_zeros(0)
        return [int(index) for index in flat.nonzero().flatten()]
    if isinstance(value, (list, tuple)):
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


# What Python and torch raise for entries that are no numbers, too large, or tensors of several values.
_NO_NUMBERS = (TypeError, ValueError, OverflowError, RuntimeError)


def log_probs(value: Any) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Log-probs as float32, shape ``(n,)``, and which of them are None (a bool mask, or None where none is).

    float32 loses nothing: it is what both engines compute in. None for a value that is no sequence of numbers.
    """
    if isinstance(value, torch.Tensor):
        column = _column(value)
        return None if column is None or column.is_complex() else (column.to(torch.float32), None)
    value = _listed(value)
    if not isinstance(value, (list, tuple)):
        return None
    if not value:
        return torch.empty(0), None
    value = _flat(value)
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


def differs_beyond_rounding(copy: torch.Tensor, original: torch.Tensor, stored: Any) -> torch.Tensor:
    """Where ``copy`` is not ``original``, by more than the type it was stored in rounds. bool, shape ``(n,)``.

    Args:
        copy, original: float32, shape ``(n,)``; NaN equals NaN.
        stored: the value that ``copy`` was read from, whose type counts.
    """
    dtype = stored.dtype if isinstance(stored, torch.Tensor) and stored.is_floating_point() else torch.float32
    step = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    allowed = original.abs() * step + torch.finfo(dtype).smallest_normal
    same = ((copy - original).abs() <= allowed) | (copy == original) | (copy.isnan() & original.isnan())
    return ~same


def unpredicted_first_token(sample: Mapping[Any, Any]) -> bool:
    """Whether a train sample has no prompt, so that no logit predicts its first token and no context-parallel rank
    owns it."""
    total = whole_number(sample.get("total_lengths"))
    return total is not None and total > 0 and total == whole_number(sample.get("response_lengths"))


def _column(value: torch.Tensor) -> torch.Tensor | None:
    """A tensor of shape ``(n,)`` or ``(n, 1)`` as ``(n,)``; None for any other."""
    value = value.detach()
    if value.dim() == 2 and value.shape[1] == 1:
        value = value[:, 0]
    return value if value.dim() == 1 else None


def _listed(value: Any) -> Any:
    """A NumPy array as a list; anything else as it is."""
    return value.tolist() if type(value).__module__ == "numpy" and hasattr(value, "tolist") else value


def _flat(value: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
    """A list of lists of one value each as a list of these values; any other as it is."""
    if isinstance(value[0], (list, tuple)) and all(isinstance(one, (list, tuple)) and len(one) == 1 for one in value):
        return [one[0] for one in value]
    return value


def integers(value: Any) -> torch.Tensor | None:
    """Whole numbers as int64, shape ``(n,)``; None for anything else. Booleans count as 0 and 1."""
    if isinstance(value, torch.Tensor):
        column = _column(value)
        if column is None or column.is_complex():
            return None
        if column.is_floating_point():
            exact = column.double()  # the shortest types cannot be rounded
            if not bool((exact == exact.round()).all()):
                return None
        whole = column.to(torch.int64)
        # The upper half of uint64 has no place in int64.
        return None if column.dtype is getattr(torch, "uint64", None) and bool((whole < 0).any()) else whole
    value = _listed(value)
    if not isinstance(value, (list, tuple)):
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
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item, counts, name, depth + 1) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, TensorReference):
        return {"file": value.path, "shape": list(value.shape), "dtype": value.dtype, "missing": value.file is None}
    item = getattr(value, "item", None)
    if callable(item) and not getattr(value, "shape", None):
        return _plain(item(), counts, name, depth + 1)  # a NumPy scalar
    kind = type(value)
    return f"<{getattr(value, 'qualified_name', '') or f'{kind.__module__}.{kind.__qualname__}'}>"
