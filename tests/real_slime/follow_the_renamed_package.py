"""A lab plug-in: what the lab knows as ``slime`` is the package that ``SLIME_INSTRUMENT_PACKAGE`` names."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

PACKAGE = os.environ["SLIME_INSTRUMENT_PACKAGE"]


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds each module of slime's under its other name, and never loads one twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "slime":
            return None
        if importlib.util.find_spec(PACKAGE + fullname.removeprefix("slime")) is None:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(PACKAGE + spec.name.removeprefix("slime"))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has given it the alias's spec; and the lab also looks into sys.modules.
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
        for name in [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]:
            sys.modules.setdefault("slime" + name.removeprefix(PACKAGE), sys.modules[name])


def before_slime() -> None:
    sys.meta_path.insert(0, _Alias())
