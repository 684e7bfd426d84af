"""The way every wrapped call takes. The target is called exactly once, outside every ``except`` of ours."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import wrapt

from slime_instrument._errors import not_ours
from slime_instrument._patching.patch import KEYWORD_ONLY, Call, State

if TYPE_CHECKING:
    from slime_instrument._patching.patch import Placement


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
        except Exception as error:
            if not_ours(error):
                raise
            in_place = False
        # In its place it is an ordinary global: what unpickles it needs no package of ours.
        return self.__qualname__ if in_place else (resolve_by_name, (self.__module__, self.__qualname__))

    def __reduce__(self) -> Any:
        return self.__reduce_ex__(2)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def make_wrapper(placement: Placement, original: Any, *, method: bool) -> Any:
    """Wrap ``original``. Methods get a plain function: Ray re-closes over the methods of an actor class in the driver
    and would ship a wrapt wrapper by value, as the unwrapped original, to every worker."""
    application = placement.application
    run = _run_around if placement.patch.around is not None else _run_instead
    if not method:

        def through(wrapped: Any, _instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return run(placement, application, wrapped, args, kwargs)

        return FunctionPatch(original, through)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return run(placement, application, original, args, kwargs)

    return wrapper


def _run_around(
    placement: Placement, application: int, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One call of a target that has a hook around it."""
    if placement.application != application:
        # An earlier wrapper of this patch, still called by what another tool put on top of it. Only the newest acts.
        return target(*args, **kwargs)
    placement.calls += 1
    call = hook = None
    failures = placement.failures
    try:
        idle = placement.patch.idle
        if not (placement.inert or (idle is not None and idle())):
            call = Call(args, kwargs, placement.positions, placement.process)
            hook = placement.patch.around(call)  # type: ignore[misc]
            next(hook)
    except StopIteration:  # it returned before its yield: nothing to do in this call
        hook = None
    except Exception as error:
        if not_ours(error):
            raise
        placement.failed(error)
        hook = None
    if call is None or hook is None:
        return target(*args, **kwargs)
    returned = False
    try:
        result = call.result = target(*call.args, **call.kwargs)
        returned = True
    finally:
        if not returned:
            _abandon(placement, hook)
    if _tear_down(placement, hook):
        result = call.result
    if placement.failures == failures:
        placement.policy.succeeded(placement.patch.name)
    return result


def _tear_down(placement: Placement, hook: Iterator[None]) -> bool:
    """Run what stands after the hook's ``yield``; True when it worked."""
    try:
        next(hook)
    except StopIteration:
        return True
    except Exception as error:
        if not_ours(error):
            raise
        placement.failed(error)
        return False
    _abandon(placement, hook)
    placement.failed(RuntimeError(f"the hook of {placement.patch.name} yields more than once"))
    return False


def _abandon(placement: Placement, hook: Any) -> None:
    """The target raised: end the hook's ``with`` blocks and ``finally`` only. The target's exception is on its way and
    nothing of ours may cover it."""
    try:
        hook.close()
    except Exception as error:
        if not_ours(error):
            raise
        placement.failed(error, may_raise=False)


def _run_instead(
    placement: Placement, application: int, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """One call of a target whose place a hook takes."""
    if placement.application != application:
        return target(*args, **kwargs)
    placement.calls += 1
    result: Any = NotImplemented
    failures = placement.failures
    try:
        idle = placement.patch.idle
        if not (placement.inert or (idle is not None and idle())):
            if placement.state is State.FAILED:
                return None
            call = Call(args, kwargs, placement.positions, placement.process)
            result = placement.patch.instead(call)  # type: ignore[misc]
    except Exception as error:
        if not_ours(error):
            raise
        placement.failed(error)
        return None
    if result is NotImplemented:
        return target(*args, **kwargs)
    if placement.failures == failures:
        placement.policy.succeeded(placement.patch.name)
    return result
