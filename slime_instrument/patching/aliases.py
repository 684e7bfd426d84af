"""Names that other modules bound with ``from x import y``: find them, repoint them, put them back."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any

__all__ = ["Alias", "repoint", "unreachable"]

Alias = tuple[dict[str, Any], str]
"""A module's namespace and the name in it."""


def repoint(old: Any, new: Any) -> list[Alias]:
    """Make every module-level name bound to ``old`` (by identity) mean ``new``; return those that were changed."""
    changed: list[Alias] = []
    for namespace in _namespaces():
        names = [name for name, value in list(namespace.items()) if value is old]
        for name in names:
            namespace[name] = new
            changed.append((namespace, name))
    return changed


def unreachable(original: Any, known: tuple[Any, ...] = ()) -> list[str]:
    """Describe holders of ``original`` that no repointing reaches: closures, defaults, partials, containers, instances.

    ``known`` are holders of our own. Slow (it walks the garbage collector's objects): for late arming only.
    """
    ours = {id(holder) for holder in known} | {id(namespace) for namespace in _namespaces()} | {id(known)}
    return sorted(
        {
            text
            for holder in gc.get_referrers(original)
            if id(holder) not in ours and (text := _describe(holder, original)) is not None
        }
    )


def _describe(holder: Any, original: Any) -> str | None:
    if isinstance(holder, functools.partial):
        return f"functools.partial of {getattr(original, '__name__', original)}"
    if isinstance(holder, CellType):
        return "a closure"
    if isinstance(holder, FunctionType) and holder is not original:
        return f"function {holder.__module__}.{holder.__qualname__}"
    if isinstance(holder, (list, set)):
        return f"a {type(holder).__name__}"
    if isinstance(holder, dict) and "__name__" not in holder and "__module__" not in holder:
        return "a dict"
    return None


def _namespaces() -> Iterator[dict[str, Any]]:
    seen: set[int] = set()
    for module in list(sys.modules.values()):
        # Lazy module stand-ins may import on attribute access; only real modules' own dicts are looked at.
        namespace = module.__dict__ if isinstance(module, ModuleType) else None
        if type(namespace) is dict and id(namespace) not in seen:
            seen.add(id(namespace))
            yield namespace
