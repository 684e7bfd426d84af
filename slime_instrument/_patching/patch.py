"""What a patch is: the places where its target may live, what it relies on, and the hook that runs around a call; and
what becomes of it in one process.

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
from dataclasses import dataclass, field
from typing import Any

from slime_instrument._errors import describe
from slime_instrument._patching.failures import FailurePolicy

KEYWORD_ONLY = -1
"""In place of a parameter's position: it is never among the positional arguments."""


class State(str, enum.Enum):
    """What has become of a patch in this process. Each state comes with a reason in words."""

    DISABLED = "DISABLED"  # not armed in this process
    PENDING = "PENDING"  # armed, the target's module is not imported yet
    ACTIVE = "ACTIVE"  # the target is wrapped
    INCOMPATIBLE = "INCOMPATIBLE"  # the target is not there or has another signature
    FAILED = "FAILED"  # could not be applied, or failed so often that it stepped out for the rest of the process
    SKIPPED = "SKIPPED"  # not applied: not needed here, or not without another patch
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
        targets: alternatives as ``module:attribute``; the first that is imported and fits is wrapped.
        group: what applies together or not at all; without one the patch stands alone.
        takes: the target's parameters that the hook relies on. A target without one of them is not wrapped.
        idle: asked before anything else in each call. True: nothing to do, so that the call costs next to nothing.
        needs: groups without which this patch is not applied.
        optional: the rest of the group is applied even where the target is missing.
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


# ---------------------------------------------------------------- in one process


def without(lacks: str) -> str:
    """The reason of a patch that fits, but belongs together with the one named ``lacks``, which is not applied."""
    return f"not applied without {lacks!r}"


Alias = tuple[dict[str, Any], str]
"""A module's namespace and the name in it."""


@dataclass
class Placement:
    """The living side of a declaration. ``wrapper`` is the handle by which the patch is removed."""

    patch: Patch
    policy: FailurePolicy
    process: Any = None
    """Handed to the hook with each call."""
    state: State = State.DISABLED
    reason: str = "not armed in this process"
    lacks: str | None = None
    """Skipped although it fits, because it belongs together with this patch, which is not applied."""
    calls: int = 0
    failures: int = 0
    inert: bool = True
    application: int = 0
    """Counts how often this patch was put on; a wrapper of an earlier time knows by it that it is out of use."""
    bypassed: bool = False
    """Drifted, and as far as can be seen the target no longer runs through ours."""
    on_failed: Callable[[], None] = lambda: None
    """Called when this patch has failed for good."""
    target: Target | None = None
    owner: Any = None
    attribute: str = ""
    inherited: bool = False
    """The attribute came from a base class: removing means deleting ours, not assigning the original."""
    original: Any = None
    wrapper: Any = None
    positions: dict[str, int] = field(default_factory=dict)
    aliases: list[Alias] = field(default_factory=list)
    misfits: dict[str, str] = field(default_factory=dict)
    """Alternative targets that were looked at and do not fit -> why."""

    def set_state(self, state: State, reason: str) -> None:
        self.state, self.reason, self.lacks = state, reason, None
        # What took the target's place keeps it after it failed for good; see instead().
        in_place = self.patch.instead is not None and state is State.FAILED
        self.inert = state not in (State.ACTIVE, State.DRIFTED) and not in_place

    def hold_back(self, lacks: str) -> None:
        """Skip it, for want of the patch named ``lacks``."""
        self.set_state(State.SKIPPED, without(lacks))
        self.lacks = lacks

    def failed(self, error: BaseException, *, may_raise: bool = True) -> None:
        """A step of ours failed inside a call. Raises in strict mode; steps out when it keeps failing."""
        self.failures += 1
        try:
            if self.policy.report(self.patch.name, error, self.patch.on_failure, may_raise=may_raise):
                self.fail_for_good(f"failed {self.failures} times, last: {describe(error)}")
        finally:
            del error  # see FailurePolicy.report

    def fail_for_good(self, reason: str) -> None:
        self.set_state(State.FAILED, reason)
        self.on_failed()

    def snapshot(self, remark: str = "") -> PatchStatus:
        reason = f"{self.reason}; {remark}" if remark else self.reason
        target = str(self.target or self.patch.targets[0])
        return PatchStatus(
            self.patch.name, self.patch.group, target, str(self.state), reason, self.calls, self.failures, self.lacks
        )


@dataclass(frozen=True)
class PatchStatus:
    """A snapshot of one patch. ``calls`` counts calls of the target since arming. ``lacks``: it fits, but the patch of
    this name, which it belongs together with, is not applied."""

    name: str
    group: str
    target: str
    state: str
    reason: str
    calls: int
    failures: int
    lacks: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Status:
    """Whether and how this process is armed, with what settings, and each patch. ``str()`` is a table."""

    armed: bool
    route: str
    settings: dict[str, Any]
    patches: tuple[PatchStatus, ...]
    failure: str | None = None

    def __iter__(self) -> Iterator[PatchStatus]:
        return iter(self.patches)

    def __getitem__(self, name: str) -> PatchStatus:
        return next(patch for patch in self.patches if patch.name == name)

    def as_dict(self) -> dict[str, Any]:
        return {
            "armed": self.armed,
            "route": self.route,
            "settings": self.settings,
            "failure": self.failure,
            "patches": [patch.as_dict() for patch in self.patches],
        }

    def __str__(self) -> str:
        head = f"armed by {self.route}" if self.armed else "not armed"
        if self.failure:
            head += f"; {self.failure}"
        rows = [("state", "calls", "target", "reason")]
        rows += [(patch.state, str(patch.calls), patch.target, patch.reason) for patch in self.patches]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = ["  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3]]) for row in rows]  # noqa: B905  # reason is unpadded
        return "\n".join([f"slime_instrument is {head}", *lines])
