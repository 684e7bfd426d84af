"""The places in slime that are touched, one file each. Deleting a file removes what it does and nothing else."""

from __future__ import annotations

import importlib
import pkgutil

from slime_instrument._patching.declaration import Patch

__all__ = ["declared"]


def declared() -> tuple[Patch, ...]:
    """Every patch declared in this folder, by file name."""
    patches: list[Patch] = []
    for module_info in sorted(pkgutil.iter_modules(__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{__name__}.{module_info.name}")
        patches += getattr(module, "PATCHES", ())
    return tuple(patches)
