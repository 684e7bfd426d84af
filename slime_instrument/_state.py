"""The state of one armed process: its settings, its patches, its dumps, and what it tells the other ranks."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from slime_instrument._capture import current_session
from slime_instrument._dump.agreement import Agreement, announce, default_store, withdraw
from slime_instrument._dump.background import BackgroundWriter
from slime_instrument._dump.rotation import Rotation, is_due
from slime_instrument._dump.topology import read_topology
from slime_instrument._errors import SettingsError
from slime_instrument._hooks import declared
from slime_instrument._live.watch import LiveMetrics
from slime_instrument._patching.declaration import State
from slime_instrument._patching.failures import FailurePolicy
from slime_instrument._patching.patcher import Patcher
from slime_instrument._patching.remarks import compiled_callers
from slime_instrument._settings import Settings

__all__ = ["Runtime"]

logger = logging.getLogger("slime_instrument")

# The patches that work before a session is open: what fails there concerns the rollout that trains next.
_LOADING = "positions"


class Runtime:
    """State of one armed process. ``route`` names how it was armed, in words."""

    def __init__(self, route: str, earlier: Runtime | None = None) -> None:
        self.route = route
        self.settings_error: SettingsError | None = None
        try:
            self.settings = Settings.from_environment()
        except SettingsError as error:
            # Kept for the start of training: arming may happen where raising would only print a traceback.
            self.settings, self.settings_error = Settings(), error
        policy = FailurePolicy(strict=lambda: self.settings.strict, listener=self._failed)
        self.patcher = Patcher(declared(), policy)
        self._failure: str | None = None  # outside of any train_actor call, such as while loading its data
        self.rotation = Rotation(self.settings)
        # A policy of its own: a file that could not be written says nothing against the dump that finds out.
        self.background = BackgroundWriter(FailurePolicy(strict=lambda: self.settings.strict).report)
        self.live = LiveMetrics(self.settings)
        self.dumps_written = 0
        self.positions_from = "unknown"  # how the data loader came by the positions of the samples
        # Kept over re-arming: the store still holds the decisions of dumps that were given up.
        self._attempts: dict[int, int] = earlier._attempts if earlier is not None else {}
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
        """A piece of ours failed: this rollout's dump is skipped as a whole. When the dump itself failed, the other
        ranks may be waiting in it; when something failed for good, they must not wait for this one any more."""
        patch, session = self.patcher.records[where].patch, current_session()
        if not patch.optional:
            text = f"{where} failed: {type(error).__name__}: {error}"
            if session is not None:
                session.failure = session.failure or text
            elif patch.group == _LOADING:
                self._failure = self._failure or text
            if session is not None and patch.hold:
                self._give_up(session.rollout_id, text)
            if for_good:
                self.step_out()

    def _give_up(self, rollout_id: int, reason: str) -> None:
        """Tell the others not to wait for this rank in this dump, unless it has no part in it."""
        try:
            has_part = read_topology().takes_part
        except Exception:
            has_part = True  # not known, and a rank that waits in vain is worse than a dump less
        if has_part and self._announced_in is not None:
            Agreement(self._announced_in, self.dump_key(rollout_id), self._announced_rank, (), 0.0).give_up(reason)

    def step_out(self) -> None:
        """Take the announcement back, so that no rank waits for this one; it is not made again by this runtime."""
        if self._announced_in is not None:
            try:
                withdraw(self._announced_in, self._announced_rank)
            except Exception:
                logger.debug("slime_instrument: could not withdraw from the store", exc_info=True)

    def take_failure(self) -> str | None:
        """What failed since the last ``train_actor`` call, and so concerns the rollout that is about to train."""
        failure, self._failure = self._failure, None
        return failure

    def training_begins(self, rollout_id: int) -> None:
        """A ``train_actor`` call that is to end in a dump begins."""
        self._step_began = time.monotonic()
        self._attempts[rollout_id] = self._attempts.get(rollout_id, -1) + 1

    def dump_key(self, rollout_id: int) -> str:
        """What identifies this dump among the ranks: the rollout, and how often it was trained before."""
        return f"{rollout_id}/{self._attempts.get(rollout_id, 0)}"

    def log_armed(self, template: str, *, details: bool) -> None:
        """The one line that each armed process logs. ``details``: also what is wrong, which one rank is enough for."""
        active = sum(record.state is State.ACTIVE for record in self.patcher)
        skipped = sum(record.state is State.SKIPPED for record in self.patcher)
        logger.info(
            "slime_instrument: armed by %s; %d patches active, %d not needed or stepped back, %d in all; "
            "one train dump per rollout goes to %s",
            self.route, active, skipped, len(self.patcher.records), template,
        )  # fmt: skip
        if not details:
            return
        for record in self.patcher:
            if record.state in ("INCOMPATIBLE", "FAILED", "DRIFTED"):
                logger.warning("slime_instrument: %s is %s: %s", record.patch.name, record.state, record.reason)
        functions = {record.patch.name: record for record in self.patcher if record.state is State.ACTIVE}
        for name, callers in compiled_callers(functions).items():
            logger.warning("slime_instrument: %s is bypassed in compiled %s", name, ", ".join(callers))
        if self.settings.unknown:
            logger.warning("slime_instrument: unknown settings ignored: %s", ", ".join(self.settings.unknown))

    def wrote(self, rollout_id: int, path: Path, size: int, seconds: float) -> None:
        """A dump is in place: say so once with what it cost, then rotate."""
        self.dumps_written += 1
        share = ""
        if self._step_began is not None:
            share = f", {100 * seconds / max(time.monotonic() - self._step_began, 1e-9):.1f} % of the train step"
        level = logging.INFO if self.dumps_written == 1 else logging.DEBUG
        logger.log(level, "slime_instrument: wrote %s, %.1f MB in %.2f s%s", path, size / 1e6, seconds, share)
        for removed in self.rotation.wrote(rollout_id, path):
            logger.debug("slime_instrument: rotation removed %s", removed)
