"""Import stubs for what the trainer imports and never calls: the inference server, and kernels for GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_SERVER = ("sglang", "sglang_router")
# slime's own Triton kernels, by the names they have had; its checkpoint converters import them.
_KERNELS = (
    "slime.backends.megatron_utils.kernels.fp8_kernel",
    "slime.backends.megatron_utils.kernels.int4_qat",
    "slime.utils.fp8_kernel",
)


class _Stub(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {"__module__": self.__name__})
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def __init__(self, serves: Callable[[str], bool]) -> None:
        self._serves = serves

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if self._serves(fullname) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__version__"] = "0.0.0"


def install() -> None:
    # The server last, so that an installed one wins; the kernels first, since slime has files for them.
    sys.meta_path.append(_Finder(lambda name: name.split(".")[0] in _SERVER))
    sys.meta_path.insert(0, _Finder(lambda name: name in _KERNELS))
