"""The state of one armed process: its settings, its patches, its dumps, and what it tells the other ranks."""

from __future__ import annotations

import logging

from slime_instrument._capture import current_session
from slime_instrument._dump.dumper import Dumper
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
        self.live = LiveMetrics(self.settings)
        self.dumps: Dumper = Dumper(
            self.settings,
            FailurePolicy(strict=lambda: self.settings.strict).report,
            self.live.after_dump,
            earlier.dumps if earlier is not None else None,
        )
        self.positions_from = "unknown"  # how the data loader came by the positions of the samples

    def refuse_bad_settings(self) -> None:
        if self.settings_error is not None:
            raise self.settings_error

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
                self.dumps.give_up(session.rollout_id, text)
            if for_good:
                self.step_out(text)

    def step_out(self, reason: str = "uninstrumented") -> None:
        self.dumps.step_out(reason)

    def take_failure(self) -> str | None:
        """What failed since the last ``train_actor`` call, and so concerns the rollout that is about to train."""
        failure, self._failure = self._failure, None
        return failure

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
