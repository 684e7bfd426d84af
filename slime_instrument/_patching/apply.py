"""Put one patch on an imported module, and take exactly that patch off again."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any, NamedTuple

import wrapt

from slime_instrument._patching.aliases import repoint, unreachable
from slime_instrument._patching.declaration import Patch, State, Target
from slime_instrument._patching.record import Record
from slime_instrument._patching.trampoline import make_wrapper, parameters

__all__ = ["Drift", "apply", "drift", "misfit", "remove"]

_ABSENT = object()


class Drift(NamedTuple):
    """What happened to an applied patch. ``bypassed``: as far as can be seen, calls no longer come through it."""

    reason: str
    bypassed: bool


def misfit(patch: Patch, target: Target, module: ModuleType) -> str | None:
    """Why ``patch`` does not fit ``target`` in ``module``; None when it does. Changes nothing."""
    try:
        original = wrapt.resolve_path(module, target.attribute)[2]
    except (wrapt.PathResolutionError, AttributeError):
        return f"{target.module} has no {target.attribute}"
    if patch.replace is not None:
        return None
    if isinstance(original, (staticmethod, classmethod, type)) or not callable(original):
        return f"{target} is a {type(original).__name__}; expected a plain function"
    try:
        taken, takes_any = parameters(original)
    except (TypeError, ValueError):
        return f"{target} has no readable signature; expected ({', '.join(patch.relies_on)})"
    lacking = [name for name in patch.relies_on if name not in taken]
    if lacking and not takes_any:
        return f"{target} takes ({', '.join(taken)}); expected also {', '.join(lacking)}"
    return None


def apply(record: Record, target: Target, module: ModuleType, *, late: bool) -> None:
    """Wrap the target and repoint the aliases that other modules already hold.

    ``late``: the module had been imported before arming, so that somebody may hold the original where no repointing
    reaches it; those holders are named in the reason.
    """
    parent, attribute, original = wrapt.resolve_path(module, target.attribute)
    method = inspect.isclass(parent)
    record.application += 1
    record.bypassed = False
    if record.patch.replace is None:
        record.positions = parameters(original)[0]
    wrapper = make_wrapper(record, original, method=method)
    record.target, record.owner, record.attribute = target, parent, attribute
    record.original, record.wrapper = original, wrapper
    record.inherited = attribute not in vars(parent)
    setattr(parent, attribute, wrapper)
    reason = "wrapped"
    if record.patch.replace is None:
        record.aliases = repoint(original, wrapper)
        if record.aliases:
            reason += f", {len(record.aliases)} alias(es) repointed"
        holders = unreachable(original, (wrapper, record, vars(record)), parent) if late else []
        if holders:
            reason += f"; not reached: {', '.join(holders)}"
    record.become(State.ACTIVE, reason)


def drift(record: Record) -> Drift | None:
    """What happened to an applied patch since: None, or who stands in its place."""
    if record.wrapper is None or record.inert or record.target is None:
        return None
    # By way of sys.modules: a reload makes new classes, an import after `del sys.modules[...]` a new module.
    try:
        owner = wrapt.resolve_path(sys.modules[record.target.module], record.target.attribute)[0]
    except (KeyError, wrapt.PathResolutionError, AttributeError):
        return Drift(f"{record.target} is gone; this patch is bypassed", True)
    if owner is not record.owner:
        return Drift(f"{record.target} was loaded again after it was wrapped; this patch is bypassed", True)
    current = _current(record)
    if current is record.wrapper:
        return None
    if _position(current, record.wrapper) is not None:
        return Drift(f"{record.target} was wrapped again by {_name(current)}", False)
    return Drift(f"{record.target} was replaced by {_name(current)}; this patch is bypassed", True)


def remove(record: Record) -> str:
    """Take the patch off and return the new reason. What is not ours stays: a wrapper on top of ours is kept."""
    record.inert = True
    outcome = "removed"
    if record.wrapper is not None:
        current = _current(record)
        if current is record.wrapper:
            if record.inherited:
                delattr(record.owner, record.attribute)
            else:
                setattr(record.owner, record.attribute, record.original)
        else:
            above = None if current is _ABSENT else _position(current, record.wrapper)
            if isinstance(above, wrapt.BaseObjectProxy):
                above.__wrapped__ = record.original
                outcome = f"removed from below {_name(current)}"
            elif above is not None:
                outcome = f"made inert below {_name(current)}, which cannot be opened"
            else:
                outcome = "removed; the target had been replaced"
        # Both the aliases that were repointed and those that were bound to the wrapper since.
        repoint(record.wrapper, record.original)
    record.wrapper = record.original = record.owner = None
    record.aliases = []
    return outcome


def _current(record: Record) -> Any:
    for holder in record.owner.__mro__ if isinstance(record.owner, type) else (record.owner,):
        if record.attribute in vars(holder):
            return vars(holder)[record.attribute]
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
