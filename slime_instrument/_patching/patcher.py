"""The registry: every declared patch with its record, armed and disarmed as groups."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

from slime_instrument._patching.apply import apply, drift, misfit, remove
from slime_instrument._patching.declaration import Patch, State, Target
from slime_instrument._patching.failures import FailurePolicy
from slime_instrument._patching.imports import ImportWatch, on_import
from slime_instrument._patching.record import Record

__all__ = ["Patcher"]


class Patcher:
    """Applies a set of patches as their modules are imported, and takes them back.

    A group applies as a whole: when one patch of it does not fit, the others of the group, and the groups that need
    it, step back. ``disarm`` removes by handle, in the reverse order of application.
    """

    def __init__(self, patches: Iterable[Patch], policy: FailurePolicy | None = None) -> None:
        self.policy = policy if policy is not None else FailurePolicy(strict=lambda: False)
        self.records = {patch.name: Record(patch, self.policy) for patch in patches}
        self.armed = False
        self._watches: list[ImportWatch] = []
        self._order: list[Record] = []
        self._lock = threading.RLock()  # hooks fire in whichever thread imports
        for record in self.records.values():
            record.on_failed = self._step_back

    def arm(self) -> None:
        """Watch for the targets' modules; those already imported are patched at once. Idempotent; arming again also
        re-applies what drifted because its module was reloaded."""
        with self._lock:
            self._reapply_replaced()
            if self.armed:
                return
            self.armed = True
            for record in self.records.values():
                record.calls = record.failures = 0
                record.missing = {}
                names = " or ".join(dict.fromkeys(target.module for target in record.patch.targets))
                record.become(State.PENDING, f"waiting for the import of {names}")
        for record in self.records.values():
            for target in record.patch.targets:
                late = target.module in sys.modules
                self._watches.append(on_import(target.module, self._arrival(record, target, late)))

    def disarm(self) -> None:
        """Take everything back. Idempotent."""
        with self._lock:
            for watch in self._watches:
                watch.cancel()
            self._watches = []
            for record in reversed(self._order):
                record.become(State.REMOVED, remove(record))
            self._order = []
            for record in self.records.values():
                if self.armed and record.state is not State.REMOVED:
                    record.become(State.REMOVED, f"was {record.state}: {record.reason}")
            self.armed = False

    def settle(self) -> None:
        """Decide what is still open: called when training starts, when all that will be imported is.

        A patch none of whose alternatives can still appear is incompatible; groups then step back. Also looks for
        drift.
        """
        with self._lock:
            for record in self.records.values():
                if record.state is State.PENDING and all(
                    str(target) in record.missing or target.module not in sys.modules for target in record.patch.targets
                ):
                    why = "; ".join(record.missing.values()) or "none of its modules is imported"
                    # A worker never imports what only the driver runs: nothing is wrong with that.
                    elsewhere = record.patch.optional and not record.missing
                    record.become(State.SKIPPED if elsewhere else State.INCOMPATIBLE, why)
            self._step_back()
            self.look_for_drift()

    def stands(self, group: str) -> bool:
        """Whether what ``group`` does can be relied on: every patch of it that is not optional is in place."""
        members = [r for r in self.records.values() if r.patch.group == group and not r.patch.optional]
        return bool(members) and all(record.state in (State.ACTIVE, State.DRIFTED) for record in members)

    def look_for_drift(self) -> None:
        """Compare every applied patch with what stands in its place now."""
        with self._lock:
            for record in self._order:
                if record.state not in (State.ACTIVE, State.DRIFTED):
                    continue
                changed = drift(record)
                if changed is not None:
                    record.bypassed = changed.bypassed
                    record.become(State.DRIFTED, changed.reason)
                elif record.state is State.DRIFTED:
                    record.bypassed = False
                    record.become(State.ACTIVE, "wrapped; what had been put on top of it is gone")

    def __iter__(self) -> Iterator[Record]:
        return iter(self.records.values())

    def _arrival(self, record: Record, target: Target, late: bool) -> Callable[[ModuleType], None]:
        def arrived(module: ModuleType) -> None:
            with self._lock:
                if not self.armed or record.state is not State.PENDING:
                    return
                self._offer(record, target, module, late)

        return arrived

    def _offer(self, record: Record, target: Target, module: ModuleType, late: bool) -> None:
        try:
            why_not = misfit(record.patch, target, module)
            unneeded = record.patch.unneeded(module) if why_not is None else None
            if unneeded is not None:
                record.target = target
                record.become(State.SKIPPED, unneeded)
            elif why_not is not None:
                record.missing[str(target)] = why_not
                if len(record.missing) == len(record.patch.targets):
                    record.become(State.INCOMPATIBLE, "; ".join(record.missing.values()))
            else:
                apply(record, target, module, late=late)
                self._order.append(record)
        except Exception as error:
            # Half applied is worse than not applied; removal copes with both.
            remove(record)
            record.become(State.FAILED, f"could not be applied: {type(error).__name__}: {error}")
        self._step_back()

    def _step_back(self) -> None:
        """Revert what must not stay without its companions, until nothing changes any more."""
        with self._lock:
            self._step_back_locked()

    def _step_back_locked(self) -> None:
        broken = {
            record.patch.group: record
            for record in self.records.values()
            if record.state in (State.INCOMPATIBLE, State.FAILED) and not record.patch.optional
        }
        while True:
            for record in self.records.values():
                cause = next((broken[g] for g in (record.patch.group, *record.patch.needs) if g in broken), None)
                if cause is None or cause is record or record.state not in (State.PENDING, State.ACTIVE, State.DRIFTED):
                    continue
                if record.patch.hold and cause.state is State.FAILED:
                    continue  # its target must not run in the middle of a run that did not have it so far
                if record in self._order:
                    self._order.remove(record)
                    remove(record)
                record.become(State.SKIPPED, f"steps back together with {cause.patch.name!r}")
            grown = {
                record.patch.group: broken[need]
                for record in self.records.values()
                for need in record.patch.needs
                if need in broken and record.patch.group not in broken
            }
            if not grown:
                return
            broken |= grown

    def _reapply_replaced(self) -> None:
        self.look_for_drift()
        for record in list(self._order):
            if record.state is not State.DRIFTED or not record.bypassed or record.target is None:
                continue
            module = sys.modules.get(record.target.module)
            self._order.remove(record)
            remove(record)
            record.missing = {}
            record.become(State.PENDING, "the target was replaced, applying again")
            if module is not None:
                self._offer(record, record.target, module, late=True)
            else:
                self._watches.append(on_import(record.target.module, self._arrival(record, record.target, late=False)))
