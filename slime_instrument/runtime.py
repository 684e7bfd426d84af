"""The instrumentation of this process: its settings, how it was armed, its patches, its dumps. One object, replaced
whole by each arming."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slime_instrument.dump.agreement import announce, default_store, withdraw
from slime_instrument.dump.rotation import Rotation, is_due
from slime_instrument.errors import SettingsError
from slime_instrument.patching.failures import FailurePolicy
from slime_instrument.patching.patcher import Patcher
from slime_instrument.patching.status import PatchStatus, Status
from slime_instrument.seams import declared
from slime_instrument.settings import Settings

__all__ = ["Runtime", "current", "instrument", "instrumented", "status", "uninstrument"]

logger = logging.getLogger("slime_instrument")


class Runtime:
    """State of one armed process. ``route`` names how it was armed, in words."""

    def __init__(self, route: str) -> None:
        self.route = route
        self.settings_error: SettingsError | None = None
        try:
            self.settings = Settings.from_environment()
        except SettingsError as error:
            # Kept for the start of training: arming may happen where raising would only print a traceback.
            self.settings, self.settings_error = Settings(), error
        policy = FailurePolicy(strict=lambda: self.settings.strict, listener=self._failed)
        self.patcher = Patcher(declared(), policy)
        self.failure_in_rollout: str | None = None  # a dump that misses a part is not written at all
        self.rotation = Rotation(self.settings)
        self.dumps_written = 0
        self.positions_from = "unknown"  # how the data loader came by the positions of the samples
        self._attempts: dict[int, int] = {}
        self._announced_in: Any = None
        self._announced_rank = -1
        self._step_began: float | None = None

    def refuse_bad_settings(self) -> None:
        if self.settings_error is not None:
            raise self.settings_error

    def due(self, rollout_id: int) -> bool:
        """Whether this rollout is dumped, as far as the settings say."""
        return is_due(self.settings, rollout_id)

    def announce(self) -> None:
        """Let the other ranks know that this one is armed; once per job store."""
        import torch.distributed as dist

        store = default_store()
        if store is not self._announced_in:
            self._announced_rank = dist.get_rank()
            announce(store, self._announced_rank)
            self._announced_in = store

    def _failed(self, where: str, error: BaseException, for_good: bool) -> None:
        """A piece of ours failed: this rollout's dump is skipped as a whole. When it failed for good, the other ranks
        must stop waiting for this one."""
        if not self.patcher.records[where].patch.optional:
            self.failure_in_rollout = self.failure_in_rollout or f"{where} failed: {type(error).__name__}: {error}"
        if for_good and self._announced_in is not None:
            try:
                withdraw(self._announced_in, self._announced_rank)
            except Exception:
                logger.debug("slime_instrument: could not withdraw from the store", exc_info=True)

    def attempt(self, rollout_id: int) -> int:
        """How often this rollout was dumped before; part of what identifies a dump among the ranks."""
        self._attempts[rollout_id] = self._attempts.get(rollout_id, -1) + 1
        return self._attempts[rollout_id]

    def training_begins(self) -> None:
        self._step_began = time.monotonic()

    def log_armed(self, template: str) -> None:
        active = [record for record in self.patcher if record.state == "ACTIVE"]
        logger.info(
            "slime_instrument: armed by %s, %d of %d patches active; one train dump per rollout goes to %s",
            self.route, len(active), len(self.patcher.records), template,
        )  # fmt: skip
        for record in self.patcher:
            if record.state in ("INCOMPATIBLE", "FAILED", "DRIFTED"):
                logger.warning("slime_instrument: %s is %s: %s", record.patch.name, record.state, record.reason)
        if self.settings.unknown:
            logger.warning("slime_instrument: unknown settings ignored: %s", ", ".join(self.settings.unknown))

    def wrote(self, rollout_id: int, path: Path, size: int, seconds: float) -> None:
        """A dump is in place: say so once with what it cost, then rotate."""
        self.dumps_written += 1
        share = ""
        if self._step_began is not None:
            share = f", {100 * seconds / max(time.monotonic() - self._step_began, 1e-9):.1f} % of the train step"
        level = logging.INFO if self.dumps_written == 1 else logging.DEBUG
        logger.log(
            level, "slime_instrument: wrote %s, %.1f MB in %.2f s%s", path, size / 1e6, seconds, share
        )
        for removed in self.rotation.wrote(rollout_id, path):
            logger.debug("slime_instrument: rotation removed %s", removed)


_current: Runtime | None = None


def current() -> Runtime:
    """The runtime of this process. RuntimeError when it is not armed."""
    if _current is None:
        raise RuntimeError("slime_instrument is not armed in this process")
    return _current


def instrument(route: str = "instrument()") -> Status:
    """Arm this process. Idempotent; arming again re-applies what a module reload undid.

    Targets that are imported already are patched at once, the others when they are imported. Raises
    :class:`~slime_instrument.errors.SettingsError` naming the variable that has a bad value; nothing is armed then.
    """
    global _current
    if _current is None or not _current.patcher.armed:
        fresh = Runtime(route)
        fresh.refuse_bad_settings()
        _current = fresh
    _current.patcher.arm()
    return status()


def arm_quietly(route: str) -> None:
    """Arm from a place that must not raise (interpreter start, an import): bad settings are kept and refused when
    training starts."""
    global _current
    if _current is None or not _current.patcher.armed:
        _current = Runtime(route)
    _current.patcher.arm()


def uninstrument() -> None:
    """Take every patch off: each module and class dict is as before. Idempotent."""
    if _current is not None:
        _current.patcher.disarm()


@contextmanager
def instrumented(route: str = "instrumented()") -> Iterator[None]:
    """Armed inside the block, taken off at its end whatever happens. Inside an armed process it changes nothing."""
    already = _current is not None and _current.patcher.armed
    instrument(route)
    try:
        yield
    finally:
        if not already:
            uninstrument()


def status() -> Status:
    """A snapshot: whether and how this process is armed, and one record per patch."""
    runtime = _current if _current is not None else Runtime("")
    runtime.patcher.look_for_drift()
    patches = []
    for record in runtime.patcher:
        shown = record.as_dict()
        patches.append(PatchStatus(**{key: shown[key] for key in PatchStatus.__dataclass_fields__}))
    failure = str(runtime.settings_error) if runtime.settings_error is not None else None
    return Status(runtime.patcher.armed, runtime.route, runtime.settings.as_dict(), tuple(patches), failure)
