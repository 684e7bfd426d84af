"""The way every wrapped call takes. The target is called exactly once, outside every ``except`` of ours."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import wrapt

from slime_instrument._patching.declaration import KEYWORD_ONLY, Advice, Call, State

if TYPE_CHECKING:
    from slime_instrument._patching.record import Record

__all__ = ["FunctionPatch", "make_wrapper", "parameters", "resolve_by_name"]


def parameters(function: Any) -> tuple[dict[str, int], bool]:
    """Positions of the named parameters (:data:`KEYWORD_ONLY` where there is none), and whether any further keyword is
    taken. (TypeError or ValueError if there is no signature to read.)"""
    found = inspect.signature(function).parameters.values()
    names = {
        p.name: KEYWORD_ONLY if p.kind is p.KEYWORD_ONLY else index
        for index, p in enumerate(found)
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    return names, any(p.kind is p.VAR_KEYWORD for p in found)


def resolve_by_name(module: str, qualname: str) -> Any:
    """The attribute that ``module`` has now. Wrapped functions are pickled as this call, so that they arrive as
    whatever the receiving process has: wrapped where it is armed, the original elsewhere."""
    return functools.reduce(getattr, qualname.split("."), importlib.import_module(module))


class FunctionPatch(wrapt.FunctionWrapper[..., Any]):
    """A wrapped module-level function that survives pickle and deepcopy, by name."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        try:
            in_place = resolve_by_name(self.__module__, self.__qualname__) is self
        except Exception:
            in_place = False
        # In its place it is an ordinary global: what unpickles it needs no package of ours.
        return self.__qualname__ if in_place else (resolve_by_name, (self.__module__, self.__qualname__))

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def make_wrapper(record: Record, original: Any, *, method: bool) -> Any:
    """Wrap ``original``. Methods get a plain function: Ray re-closes over the methods of an actor class in the driver
    and would ship a wrapt wrapper by value, as the unwrapped original, to every worker."""
    if record.patch.replace is not None:
        return record.patch.replace(original)
    application = record.application
    if not method:

        def through(wrapped: Any, _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return run(record, application, wrapped, args, kwargs)

        return FunctionPatch(original, through)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return run(record, application, original, args, kwargs)

    return wrapper


def run(
    record: Record, application: int, wrapped: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One call of a wrapped target."""
    if record.application != application:
        # An earlier wrapper of this patch, still called by what another tool put on top of it. Only the newest acts.
        return wrapped(*args, **kwargs)
    record.calls += 1
    try:
        idle = record.patch.idle
        leave_alone = record.inert or (idle is not None and idle())
    except Exception as error:
        record.failed(error)
        leave_alone = not record.patch.hold
    if leave_alone:
        return wrapped(*args, **kwargs)
    if record.state is State.FAILED:  # a patch that holds its target back
        return None
    failures = record.failures
    advice = _ask(record, Call(args, kwargs, record.positions))
    if advice is None:
        # One that holds its target back does so too when it cannot say what to do.
        held = record.patch.hold and record.failures > failures
        return None if held else wrapped(*args, **kwargs)
    if advice.instead is not None:
        return _counted(record, failures, _guarded(record, advice.instead, None))
    args, kwargs = advice.arguments or (args, kwargs)
    if advice.cleanup is None:
        result = wrapped(*args, **kwargs)
    else:
        returned = False
        try:
            result = wrapped(*args, **kwargs)
            returned = True
        finally:
            _guarded(record, advice.cleanup, None, may_raise=returned)
    if advice.after is not None:
        result = _guarded(record, functools.partial(advice.after, result), result)
    return _counted(record, failures, result)


def _counted(record: Record, failures_before: int, result: Any) -> Any:
    """A call in which all steps worked ends a row of failures; one working step among failing ones does not."""
    if record.failures == failures_before:
        record.policy.succeeded(record.patch.name)
    return result


def _ask(record: Record, call: Call) -> Advice | None:
    assert record.patch.before is not None
    try:  # as _guarded does, without the cost of a closure in every call
        return record.patch.before(call)
    except Exception as error:
        record.failed(error)
    rescue = record.patch.rescue
    return None if rescue is None else _guarded(record, lambda: rescue(call), None)


def _guarded(record: Record, step: Callable[[], Any], otherwise: Any, *, may_raise: bool = True) -> Any:
    try:
        return step()
    except Exception as error:
        record.failed(error, may_raise=may_raise)
        return otherwise
