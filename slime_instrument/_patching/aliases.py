"""Names that other modules bound with ``from x import y``: find them, repoint them, put them back."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CellType, FrameType, FunctionType, MethodType, ModuleType, TracebackType
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


def unreachable(original: Any, known: tuple[Any, ...] = (), owner: Any = None) -> list[str]:
    """Describe holders of ``original`` that no repointing reaches: closures, defaults, partials, containers, instances.

    ``known`` are holders of our own. ``owner``: the class that ``original`` is a method of; it and its bases may hold
    it. Slow (it walks the garbage collector's objects): for late arming only.
    """
    ours = {id(holder) for holder in known} | {id(namespace) for namespace in _namespaces()} | {id(known)}
    for cls in owner.__mro__ if isinstance(owner, type) else ():
        ours |= {id(cls), *(id(held) for held in gc.get_referents(cls) if type(held) is dict)}
    for wrapper in known:
        if type(wrapper) is FunctionType:  # a wrapper of ours holds the original in its closure and as __wrapped__
            ours |= {id(vars(wrapper)), *map(id, wrapper.__closure__ or ())}
    found = set()
    for holder in gc.get_referrers(original):  # a loop: a comprehension would be a closure over the original itself
        text = None if id(holder) in ours else _describe(holder, original)
        if text is not None:
            found.add(text)
    return sorted(found)


def _describe(holder: Any, original: Any) -> str | None:
    kind = type(holder)
    if isinstance(holder, (FrameType, TracebackType)) or holder is original:
        return None  # a call that is running; it ends by itself
    if kind is functools.partial:
        return f"a functools.partial of {getattr(original, '__name__', original)}"
    if kind is CellType:
        return "a closure" + _of_function(gc.get_referrers(holder), lambda f: f.__closure__ or (), holder)
    if kind is tuple:
        default = _of_function([holder], lambda f: (f.__defaults__,), holder)
        return f"a default{default}" if default else "a tuple"
    if kind is dict:
        default = _of_function([holder], lambda f: (f.__kwdefaults__,), holder)
        if default:
            return f"a default{default}"
        if "__module__" in holder and "__dict__" in holder:
            return f"a class in {holder['__module__']}"
        return "a dict"
    if kind is MethodType:
        return "a bound method"
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"


def _of_function(holders: list[Any], parts: Callable[[FunctionType], Iterable[Any]], part: Any) -> str:
    """`` of <name>`` for the function that has ``part`` among its ``parts``; "" where there is none."""
    for holder in holders:
        for function in gc.get_referrers(holder):
            if type(function) is FunctionType and any(each is part for each in parts(function)):
                return f" of {function.__module__}.{function.__qualname__}"
    return ""


def _namespaces() -> Iterator[dict[str, Any]]:
    seen: set[int] = set()
    for module in list(sys.modules.values()):
        # Lazy modules (importlib.util.LazyLoader, some frameworks') import on any attribute access, also of __dict__.
        namespace = object.__getattribute__(module, "__dict__") if issubclass(type(module), ModuleType) else None
        if type(namespace) is dict and id(namespace) not in seen:
            seen.add(id(namespace))
            yield namespace
