"""A class of the shape of slime's references to tensor files, under slime's names while a test wants it there."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


@contextlib.contextmanager
def tensor_store(module: str = "slime.utils.tensor_store", name: str = "DiskTensorRef") -> Iterator[Any]:
    """The class, importable as ``module.name`` inside of the block only. ``reads`` counts its ``load()`` calls."""

    @dataclass(frozen=True)
    class Reference:
        path: str
        shape: tuple[int, ...]
        dtype: str
        nbytes: int
        kind: str | None = None
        validated: bool = False

        @classmethod
        def write(cls, tensor: torch.Tensor, path: Path) -> Any:
            from safetensors.torch import save_file

            path.parent.mkdir(parents=True, exist_ok=True)
            save_file({"tensor": tensor}, path)
            return cls(str(path), tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)

        def link(self, path: str | Path) -> Any:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.link(self.path, path)
            return replace(self, path=str(path))

        def load(self) -> torch.Tensor:
            from safetensors.torch import load_file

            type(self).reads += 1  # type: ignore[attr-defined]
            return load_file(self.path)["tensor"]

    Reference.reads = 0  # type: ignore[attr-defined]
    Reference.__module__, Reference.__qualname__, Reference.__name__ = module, name, name
    parts = module.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    before = {one: sys.modules.get(one) for one in names}
    sys.modules.update({one: ModuleType(one) for one in names})
    setattr(sys.modules[module], name, Reference)
    try:
        yield Reference
    finally:
        for one, old in before.items():
            if old is None:
                del sys.modules[one]
            else:
                sys.modules[one] = old
