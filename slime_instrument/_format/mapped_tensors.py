"""What the mapped loader puts in the place of torch's own storages and of the function that rebuilds a tensor."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["STORAGE_TYPES", "RebuildTensor", "StorageType", "Unfamiliar"]

STORAGE_TYPES = {
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
}


class Unfamiliar(Exception):
    """The file holds something that this loader leaves to torch's."""


class StorageType:
    """A type of storage as the pickle names it. Not callable."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class RebuildTensor:
    """Stands for the function that rebuilds a tensor; the unpickler calls :meth:`__call__` with what the file says."""

    def __call__(
        self, base: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, flags: Any = None
    ) -> torch.Tensor:
        numbers = (offset, *size, *stride)
        if not isinstance(base, torch.Tensor) or requires_grad is True or hooks or len(size) != len(stride):
            raise Unfamiliar("tensor")
        if flags:
            # Such as that the values in the file are those of the negative.
            raise Unfamiliar("tensor with flags")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise Unfamiliar("tensor")
        if size == (len(base),) and stride == (1,) and offset == 0:
            return base
        if 0 not in size:
            last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
            if last >= len(base):
                raise Unfamiliar("tensor outside of its storage")
        return base.as_strided(size, stride, offset)
