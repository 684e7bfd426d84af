"""What an applied patch cannot notice about itself: it is never called, or compiled code calls past it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

from slime_instrument._patching.declaration import State
from slime_instrument._patching.record import Record

__all__ = ["compiled_callers", "remarks"]

# torch leaves the function that it compiled here, on the function that it returns.
_COMPILED = "_torchdynamo_orig_callable"


def remarks(records: Iterable[Record], *, trained: bool) -> dict[str, str]:
    """Patch name -> what to add to its reason. ``trained``: training ran in this process since it was armed."""
    found: dict[str, list[str]] = {}
    wrapped = [record for record in records if record.state is State.ACTIVE and record.patch.before is not None]
    for record in wrapped:
        if trained and record.calls == 0:
            found.setdefault(record.patch.name, []).append("never called although training ran")
    functions = {record.patch.name: record for record in wrapped if not isinstance(record.owner, type)}
    for name, callers in compiled_callers(functions).items():
        found.setdefault(name, []).append(f"bypassed in {', '.join(callers)}, which torch.compile compiled")
    return {name: "; ".join(texts) for name, texts in found.items()}


def compiled_callers(functions: dict[str, Record]) -> dict[str, list[str]]:
    """Patch name -> compiled functions that call its wrapper by name.

    torch.compile traces through such a wrapper into the original, without a graph break and without a word. Only
    direct callers that a module or class holds are found; for the others there is the count of calls.
    """
    callers: dict[str, list[str]] = {}
    if "torch._dynamo" not in sys.modules:
        return callers  # nothing was compiled
    for function in _compiled_functions():
        names = set(_names(function.__code__))
        for name, record in functions.items():
            if record.attribute in names and _reaches(function, record.attribute, record.wrapper):
                callers.setdefault(name, []).append(f"{function.__module__}.{function.__qualname__}")
    return {name: sorted(set(found)) for name, found in callers.items()}


def _compiled_functions() -> Iterator[FunctionType]:
    # Anything may stand in sys.modules; lazy stand-ins import on attribute access, real modules' dicts do not.
    modules: list[object] = list(sys.modules.values())
    for module in modules:
        if not isinstance(module, ModuleType):
            continue
        for value in list(vars(module).values()):
            # By type(), not isinstance(): that would ask for __class__, and deprecated stand-ins warn when asked.
            inside = list(vars(value).values()) if issubclass(type(value), type) else [value]
            for candidate in inside:
                original = vars(candidate).get(_COMPILED) if type(candidate) is FunctionType else None
                if type(original) is FunctionType:
                    yield original


def _names(code: Any) -> Iterator[str]:
    """Names that the code looks up, its inner functions' included."""
    yield from code.co_names
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _names(constant)


def _reaches(function: FunctionType, attribute: str, wrapper: Any) -> bool:
    """Whether ``attribute`` means the wrapper there: as a name of the function's module, or of a module it knows."""
    namespace = function.__globals__
    if namespace.get(attribute) is wrapper:
        return True
    known = [namespace[name] for name in _names(function.__code__) if isinstance(namespace.get(name), ModuleType)]
    return any(vars(module).get(attribute) is wrapper for module in known)
