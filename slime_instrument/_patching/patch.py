"""What a patch is: the places where its target may live, what it relies on, and the hook that runs around a call.

A hook is a generator in pluggy's style::

    @around("train-actor", "package.module:Class.method", takes=("self", "data"))
    def train_actor(call):
        with open_session(call["data"]):  # set-up
            yield                         # the target runs here, called by the trampoline
        look_at(call.result)              # only when the target returned

Set-up ends at the single ``yield``. ``with`` blocks and ``finally`` around it end whatever happens; what stands after
it runs only when the target returned. A hook that returns before its ``yield`` leaves the call alone.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

KEYWORD_ONLY = -1
"""In place of a parameter's position: it is never among the positional arguments."""


class State(str, enum.Enum):
    """What has become of a patch in this process. Each state comes with a reason in words."""

    DISABLED = "DISABLED"  # not armed in this process
    PENDING = "PENDING"  # armed, the target's module is not imported yet
    ACTIVE = "ACTIVE"  # the target is wrapped
    INCOMPATIBLE = "INCOMPATIBLE"  # the target is not there or has another signature
    FAILED = "FAILED"  # failed repeatedly and stepped out for the rest of the process
    SKIPPED = "SKIPPED"  # not needed here, or stepped back together with another patch
    DRIFTED = "DRIFTED"  # somebody replaced or wrapped the target after us
    REMOVED = "REMOVED"  # taken back by uninstrument()

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Target:
    """One place where the attribute may live: an importable module and a dotted path in it."""

    module: str
    attribute: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """From ``package.module:Class.method``."""
        module, _, attribute = text.partition(":")
        return cls(module, attribute)

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


class Call:
    """One call of a target, with its arguments by the target's own parameter names.

    ``call["name"]`` is the argument as it was passed; KeyError where the call leaves it to its default. Assigning to
    ``call["name"]`` hands another value to the target; the caller's own objects stay as they are. After the ``yield``,
    ``result`` is what the target returned; assigning to it replaces what the caller gets. ``process`` is what the
    patcher was given for its hooks.
    """

    __slots__ = ("_positions", "args", "kwargs", "process", "result")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], positions: dict[str, int], process: Any) -> None:
        self.args, self.kwargs, self._positions, self.process = args, kwargs, positions, process
        self.result: Any = None

    def __getitem__(self, name: str) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        index = self._positions.get(name, KEYWORD_ONLY)
        if not 0 <= index < len(self.args):
            raise KeyError(name)
        return self.args[index]

    def __setitem__(self, name: str, value: Any) -> None:
        index = self._positions.get(name, KEYWORD_ONLY)
        if name in self.kwargs or not 0 <= index < len(self.args):
            self.kwargs = {**self.kwargs, name: value}
        else:
            self.args = (*self.args[:index], value, *self.args[index + 1 :])

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


Around = Callable[[Call], Iterator[None]]
Instead = Callable[[Call], Any]


@dataclass(frozen=True)
class Already:
    """What makes a patch unnecessary: where there is something at ``target``, ``reason`` holds."""

    target: Target
    reason: str


@dataclass(frozen=True)
class Patch:
    """A declaration; made by :func:`around` or :func:`instead`, whose arguments it holds."""

    name: str
    targets: tuple[Target, ...]
    group: str
    takes: tuple[str, ...] = ()
    around: Around | None = None
    instead: Instead | None = None
    idle: Callable[[], bool] | None = None
    needs: tuple[str, ...] = ()
    optional: bool = False
    on_failure: str = "What it adds is lost for this call."
    unless: Already | None = None

    def __post_init__(self) -> None:
        if not self.targets or (self.around is None) == (self.instead is None):
            raise TypeError(f"patch {self.name!r} needs targets, and either around or instead")


def around(name: str, *targets: str, group: str = "", **more: Any) -> Callable[[Around], Patch]:
    """Declare the decorated generator as the hook around a target.

    Args:
        name: of the patch, in ``status()``.
        targets: alternatives as ``module:attribute``; the first that exists is wrapped.
        group: what applies together or not at all; without one the patch stands alone.
        takes: the target's parameters that the hook relies on. A target without one of them is not wrapped.
        idle: asked before anything else in each call. True: nothing to do, so that the call costs next to nothing.
        needs: groups without which this patch is not applied.
        optional: the target may be missing without the group stepping back.
        on_failure: what a failure costs, as a sentence for the log.
        unless: what makes the patch unnecessary; it is skipped then, whether its target fits or not.
    """
    return lambda hook: Patch(name, tuple(map(Target.parse, targets)), group or name, around=hook, **more)


def instead(name: str, *targets: str, group: str = "", **more: Any) -> Callable[[Instead], Patch]:
    """Declare the decorated function as what is called in place of a target; arguments as for :func:`around`.

    Its result is the caller's. ``NotImplemented`` means that this call is the target's own after all. The target is
    not called when the hook fails, nor after it has failed for good: what is taken over stays so.
    """
    return lambda hook: Patch(name, tuple(map(Target.parse, targets)), group or name, instead=hook, **more)
