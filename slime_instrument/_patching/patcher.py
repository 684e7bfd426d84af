"""Every declared patch with its placement in this process, put on and taken off as groups."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import wrapt

from slime_instrument._errors import describe, log, not_ours, traceback_text
from slime_instrument._patching.apply import apply, drift, remove
from slime_instrument._patching.failures import FailurePolicy
from slime_instrument._patching.fit import look_at, misfit, stepping_back
from slime_instrument._patching.patch import Already, Patch, PatchStatus, Placement, State, Target

_IN_PLACE = (State.ACTIVE, State.DRIFTED)


class Patcher:
    """Applies a set of patches as their modules are imported, and takes them back.

    A group applies as a whole: when one patch of it does not fit, the others of the group, and the groups that need
    it, step back. ``disarm`` removes by handle, in the reverse order of application. ``process`` is handed to the
    hooks with each call.
    """

    def __init__(self, patches: Iterable[Patch], policy: FailurePolicy | None = None, process: Any = None) -> None:
        self.policy = policy if policy is not None else FailurePolicy(strict=lambda: False)
        self._placements = {patch.name: Placement(patch, self.policy, process) for patch in patches}
        self.armed = False
        self._watches: list[ImportWatch] = []
        self._applied: list[Placement] = []
        self._lock = threading.RLock()  # import hooks run in whichever thread imports
        for placement in self:
            placement.on_failed = self._step_back

    def __iter__(self) -> Iterator[Placement]:
        return iter(self._placements.values())

    def __getitem__(self, name: str) -> Placement:
        return self._placements[name]

    def arm(self) -> None:
        """Watch for the targets' modules; those already imported are patched at once. Idempotent; arming again also
        re-applies what drifted because its module was reloaded."""
        with self._lock:
            self._reapply_replaced()
            if self.armed:
                return
            self.armed = True
            for placement in self:
                placement.calls = placement.failures = 0
                placement.misfits = {}
                names = " or ".join(dict.fromkeys(target.module for target in placement.patch.targets))
                placement.set_state(State.PENDING, f"waiting for the import of {names}")
        for placement in self:
            if placement.patch.unless is not None:
                already = placement.patch.unless
                self._watches.append(on_import(already.target.module, self._on_alternative(placement, already)))
            for target in placement.patch.targets:
                self._watches.append(on_import(target.module, self._on_arrival(placement, target)))

    def disarm(self) -> None:
        """Take everything back. Idempotent."""
        with self._lock:
            for watch in self._watches:
                watch.cancel()
            self._watches = []
            for placement in reversed(self._applied):
                placement.set_state(State.REMOVED, remove(placement))
            self._applied = []
            for placement in self:
                if self.armed and placement.state is not State.REMOVED:
                    placement.set_state(State.REMOVED, f"was {placement.state}: {placement.reason}")
            self.armed = False

    def finalize(self) -> None:
        """Decide what is still open: called when everything that will be imported has been.

        A patch none of whose alternatives can still appear is incompatible; groups then step back. Also looks for
        drift.
        """
        with self._lock:
            for placement in self:
                if placement.state is State.PENDING and not placement.patch.optional:
                    self._import_alternatives(placement)
                if placement.state is State.PENDING and all(
                    str(target) in placement.misfits or target.module not in sys.modules
                    for target in placement.patch.targets
                ):
                    why = "; ".join(placement.misfits.values()) or "none of its modules is imported"
                    # A worker never imports what only the driver runs: nothing is wrong with that.
                    elsewhere = placement.patch.optional and not placement.misfits
                    placement.set_state(State.SKIPPED if elsewhere else State.INCOMPATIBLE, why)
            self._step_back()
            self.look_for_drift()

    def _import_alternatives(self, placement: Placement) -> None:
        """A module that nothing imports any more may still offer the target, from where that is now."""
        for target in placement.patch.targets:
            if target.module in sys.modules or target.module.partition(".")[0] not in sys.modules:
                continue
            try:
                importlib.import_module(target.module)
            except Exception as error:
                if not_ours(error):
                    raise

    def is_active(self, group: str) -> bool:
        """Whether what ``group`` does can be relied on: every patch of it that is not optional is in place."""
        members = [each for each in self if each.patch.group == group and not each.patch.optional]
        return bool(members) and all(each.state in _IN_PLACE for each in members)

    def look_for_drift(self) -> None:
        """Compare every applied patch with what is in its place now."""
        with self._lock:
            for placement in self._applied:
                if placement.state not in _IN_PLACE:
                    continue
                changed = drift(placement)
                if changed is not None:
                    placement.bypassed = changed.bypassed
                    placement.set_state(State.DRIFTED, changed.reason)
                elif placement.state is State.DRIFTED:
                    placement.bypassed = False
                    placement.set_state(State.ACTIVE, "wrapped; what had been put on top of it is gone")

    def snapshots(self, *, used: bool = False) -> tuple[PatchStatus, ...]:
        """The patches' states. ``used``: what they are for has happened, so that one which was never called may be
        bypassed in a way that cannot be seen."""
        return tuple(
            each.snapshot(_NEVER_CALLED if used and each.state is State.ACTIVE and not each.calls else "")
            for each in self
        )

    def _on_arrival(self, placement: Placement, target: Target) -> Callable[[ModuleType], None]:
        def arrived(module: ModuleType) -> None:
            with self._lock:
                if self.armed and placement.state is State.PENDING:
                    self._offer(placement, target, module)

        return arrived

    def _on_alternative(self, placement: Placement, already: Already) -> Callable[[ModuleType], None]:
        """Where it is there, the patch is not needed: it comes off, and whether its target fits is of no interest."""

        def arrived(module: ModuleType) -> None:
            with self._lock:
                if not self.armed or placement.state is State.FAILED:
                    return
                try:
                    if look_at(module, already.target.attribute) is None:
                        return
                    if placement in self._applied:
                        self._applied.remove(placement)
                        remove(placement)
                    placement.set_state(State.SKIPPED, already.reason)
                except Exception as error:
                    placement.set_state(State.FAILED, f"could not be applied: {describe(error)}")
                    if not_ours(error):
                        raise
                    self._step_back()

        return arrived

    def _offer(self, placement: Placement, target: Target, module: ModuleType) -> None:
        try:
            why_not = misfit(placement.patch, target, look_at(module, target.attribute))
            if why_not is not None:
                placement.misfits[str(target)] = why_not
                if len(placement.misfits) == len(placement.patch.targets):
                    placement.set_state(State.INCOMPATIBLE, "; ".join(placement.misfits.values()))
            else:
                apply(placement, target, module)
                self._applied.append(placement)
        except Exception as error:
            # Half applied is worse than not applied; removal copes with both.
            remove(placement)
            placement.set_state(State.FAILED, f"could not be applied: {describe(error)}")
            if not_ours(error):
                raise
        self._step_back()

    def _step_back(self) -> None:
        """Take off what must not stay without its companions."""
        with self._lock:
            broken = [each for each in self if each.state in (State.INCOMPATIBLE, State.FAILED)]
            causes = stepping_back((each.patch for each in self), (each.patch for each in broken))
            for name, cause in causes.items():
                placement = self[name]
                if placement.state not in (State.PENDING, *_IN_PLACE):
                    continue
                if placement.patch.instead is not None and self[cause.name].state is State.FAILED:
                    continue  # its target must not run in the middle of a run that did not have it so far
                if placement in self._applied:
                    self._applied.remove(placement)
                    remove(placement)
                placement.hold_back(cause.name)

    def _reapply_replaced(self) -> None:
        self.look_for_drift()
        for placement in list(self._applied):
            target = placement.target
            if placement.state is not State.DRIFTED or not placement.bypassed or target is None:
                continue
            self._applied.remove(placement)
            remove(placement)
            placement.misfits = {}
            placement.set_state(State.PENDING, "the target was replaced, applying again")
            module = sys.modules.get(target.module)
            if module is not None:
                self._offer(placement, target, module)
            else:
                self._watches.append(on_import(target.module, self._on_arrival(placement, target)))


_NEVER_CALLED = (
    "never called although training ran: not needed in this run, or the original is called past it, by code that "
    "torch.compile compiled or by a partial or closure made before arming"
)


# ---------------------------------------------------------------- once a module has been imported
#
# wrapt's post-import hooks do the work. Two things are added: a hook for a module that is half imported waits for the
# end of its import, and a hook can be cancelled.


class ImportWatch:
    """A registered wish; ``cancel()`` makes it inert. Each wish fires at most once."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._action: Callable[[ModuleType], None] | None = action

    def cancel(self) -> None:
        self._action = None

    def fire(self, module: ModuleType) -> None:
        """Run the action. An exception here would make the target's import fail once, so none leaves."""
        action, self._action = self._action, None
        if action is None:
            return
        try:
            action(module)
        except Exception as error:
            if not_ours(error):
                raise
            text = traceback_text(error)
            log(logging.ERROR, "slime_instrument: a hook for %s failed; the import goes on\n%s", self.name, text)


class _WatchedSpec(ModuleSpec):
    """A module spec that tells when its import has ended.

    The import system clears ``_initializing`` as its last step, on success and on failure. A hook registered while
    the module is half imported has nothing else to wait for.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            watches = self.__dict__.pop("_slime_instrument_watches", [])
            self.__class__ = ModuleSpec  # type: ignore[assignment]  # back to what it was
            module = sys.modules.get(self.name)
            for watch in watches:
                if module is not None:
                    watch.fire(module)
                else:  # that import failed; wait for the next one
                    wrapt.register_post_import_hook(watch.fire, watch.name)


def on_import(name: str, action: Callable[[ModuleType], None]) -> ImportWatch:
    """Call ``action(module)`` once ``name`` is imported: at once if it is, at the end if it is being imported."""
    watch = ImportWatch(name, action)
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is not None and getattr(spec, "_initializing", False) and type(spec) in (ModuleSpec, _WatchedSpec):
        if type(spec) is ModuleSpec:
            spec.__class__ = _WatchedSpec
        spec.__dict__.setdefault("_slime_instrument_watches", []).append(watch)
    else:
        wrapt.register_post_import_hook(watch.fire, name)
    return watch
