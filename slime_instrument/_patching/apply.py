"""Put one patch on an imported module, and take exactly that patch off again."""

from __future__ import annotations

import inspect
import itertools
import operator
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

import wrapt

from slime_instrument._patching.patch import Alias, Placement, State, Target
from slime_instrument._patching.trampoline import make_wrapper, parameters

_ABSENT = object()


class Drift(NamedTuple):
    """What happened to an applied patch. ``bypassed``: as far as can be seen, calls no longer come through it."""

    reason: str
    bypassed: bool


def apply(placement: Placement, target: Target, module: ModuleType) -> None:
    """Wrap the target and repoint the names that other modules bound to it with ``from x import y``."""
    parent, attribute, original = wrapt.resolve_path(module, target.attribute)
    placement.application += 1
    placement.bypassed = False
    placement.positions = parameters(original)[0]
    wrapper = make_wrapper(placement, original, method=inspect.isclass(parent))
    placement.target, placement.owner, placement.attribute = target, parent, attribute
    placement.original, placement.wrapper = original, wrapper
    placement.inherited = attribute not in vars(parent)
    setattr(parent, attribute, wrapper)
    placement.aliases = repoint(original, wrapper)
    repointed = f", {len(placement.aliases)} alias(es) repointed" if placement.aliases else ""
    placement.set_state(State.ACTIVE, f"wrapped{repointed}")


def drift(placement: Placement) -> Drift | None:
    """What happened to an applied patch since: None, or what is in its place now."""
    if placement.wrapper is None or placement.inert or placement.target is None:
        return None
    # By way of sys.modules: a reload makes new classes, an import after `del sys.modules[...]` a new module.
    try:
        owner = wrapt.resolve_path(sys.modules[placement.target.module], placement.target.attribute)[0]
    except (KeyError, wrapt.PathResolutionError, AttributeError):
        return Drift(f"{placement.target} is gone; this patch is bypassed", True)
    if owner is not placement.owner:
        return Drift(f"{placement.target} was loaded again after it was wrapped; this patch is bypassed", True)
    current = _current(placement)
    if current is placement.wrapper:
        return None
    if _position(current, placement.wrapper) is not None:
        return Drift(f"{placement.target} was wrapped again by {_name(current)}", False)
    return Drift(f"{placement.target} was replaced by {_name(current)}; this patch is bypassed", True)


def remove(placement: Placement) -> str:
    """Take the patch off and return the new reason. What is not ours stays: a wrapper on top of ours is kept."""
    placement.inert = True
    outcome = "removed"
    if placement.wrapper is not None:
        current = _current(placement)
        if current is placement.wrapper:
            if placement.inherited:
                delattr(placement.owner, placement.attribute)
            else:
                setattr(placement.owner, placement.attribute, placement.original)
        else:
            above = None if current is _ABSENT else _position(current, placement.wrapper)
            if isinstance(above, wrapt.BaseObjectProxy):
                above.__wrapped__ = placement.original
                outcome = f"removed from below {_name(current)}"
            elif above is not None:
                outcome = f"made inert below {_name(current)}, which cannot be opened"
            else:
                outcome = "removed; the target had been replaced"
        # Both the aliases that were repointed and those that were bound to the wrapper since.
        repoint(placement.wrapper, placement.original)
    placement.wrapper = placement.original = placement.owner = None
    placement.aliases = []
    return outcome


def repoint(old: Any, new: Any) -> list[Alias]:
    """Make every module-level name bound to ``old`` (by identity) mean ``new``; return those that were changed."""
    changed: list[Alias] = []
    for namespace in _namespaces():
        # A process that trains has thousands of modules, of which a handful hold the name: this is quick on the others.
        if not any(map(operator.is_, list(namespace.values()), itertools.repeat(old))):
            continue
        for name in [name for name, value in list(namespace.items()) if value is old]:
            namespace[name] = new
            changed.append((namespace, name))
    return changed


def _namespaces() -> Iterator[dict[str, Any]]:
    seen: set[int] = set()
    for module in list(sys.modules.values()):
        # Lazy modules (importlib.util.LazyLoader, some frameworks') import on any attribute access, also of __dict__.
        namespace = object.__getattribute__(module, "__dict__") if issubclass(type(module), ModuleType) else None
        if type(namespace) is dict and id(namespace) not in seen:
            seen.add(id(namespace))
            yield namespace


def _current(placement: Placement) -> Any:
    owner = placement.owner
    for holder in owner.__mro__ if isinstance(owner, type) else (owner,):
        if placement.attribute in vars(holder):
            return vars(holder)[placement.attribute]
    return _ABSENT


def _position(outermost: Any, wrapper: Any) -> Any:
    """The wrapper directly above ours in a chain of ``__wrapped__``, or None if ours is not in it."""
    above, seen = outermost, set()
    while id(above) not in seen:
        seen.add(id(above))
        below = getattr(above, "__wrapped__", None)
        if below is wrapper:
            return above
        if below is None:
            return None
        above = below
    return None


def _name(thing: Any) -> str:
    kind = type(thing)
    if issubclass(kind, wrapt.BaseObjectProxy):
        return f"{kind.__module__}.{kind.__qualname__}"
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', kind.__qualname__)}"
