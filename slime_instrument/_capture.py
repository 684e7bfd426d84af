"""First-seen log-probs of the training forward, by sample. One session per ``train_actor`` call, no other state.

The session is reached through a context variable, so that threads and nested calls each see their own. It holds
detached copies only: no autograd graph and no view of a buffer that the next micro-batch may overwrite.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "LOCAL_KEY",
    "POSITION_KEY",
    "CaptureSession",
    "capturing",
    "current_session",
    "enter",
    "enter_policy_loss",
    "leave",
    "leave_policy_loss",
    "policy_batch",
]

POSITION_KEY = "partition"
"""slime's own name for each local sample's position in the rollout; what travels inside the micro-batch."""
LOCAL_KEY = "_slime_instrument_local"
"""Stand-in key where the positions are not known: the index among the local samples."""

_SESSION: ContextVar[CaptureSession | None] = ContextVar("slime_instrument_session", default=None)
_POLICY_BATCH: ContextVar[Any] = ContextVar("slime_instrument_policy_batch", default=None)


class CaptureSession:
    """What one ``train_actor`` call leaves for its dump.

    ``rollout_data`` is slime's dict of per-sample lists for this data-parallel rank. ``wanted`` is False where slime
    computes the log-probs itself: then nothing is copied.
    """

    def __init__(self, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        self.rollout_id = rollout_id
        self.rollout_data = rollout_data
        self.key = POSITION_KEY if _identify(rollout_data.get(POSITION_KEY), rollout_data) else LOCAL_KEY
        self.failure: str | None = None
        """Why a part of this rollout is missing, where one is: then its dump is not written at all."""
        self.keys_at_start = frozenset(rollout_data)
        self.optimizer_step: int | None = None
        self._had_log_probs = True
        self._values: dict[int, torch.Tensor] = {}
        self._steps: dict[int, int | None] = {}

    @property
    def wanted(self) -> bool:
        return self.rollout_data.get("log_probs") is None

    @property
    def native_capture(self) -> bool:
        """Whether slime itself added log-probs from the training forward, as it does since #2266."""
        return not self._had_log_probs and not self.wanted

    def begin_step(self, step: int) -> None:
        """The optimizer step ``step`` of this rollout begins."""
        if self.optimizer_step is None:
            self._had_log_probs = not self.wanted
        self.optimizer_step = step

    def capture(self, positions: Sequence[int], log_probs: Sequence[torch.Tensor]) -> None:
        """Keep each sample's log-probs (shape ``(local response tokens,)``) unless the sample was seen before.

        One device operation for the micro-batch: the per-sample tensors are copied as one and cut into views.
        Raises ValueError when positions and log-probs differ in number.
        """
        if len(positions) != len(log_probs):
            raise ValueError(f"{len(positions)} positions for {len(log_probs)} log-prob tensors in one micro-batch")
        if all(position in self._values for position in positions):
            return
        import torch

        with torch.no_grad():
            lengths = [len(value) for value in log_probs]
            copied = torch.split(torch.cat([value.detach() for value in log_probs]), lengths)
        for position, value in zip(positions, copied, strict=True):
            if position not in self._values:
                self._values[position] = value
                self._steps[position] = self.optimizer_step

    def collected(self) -> tuple[list[torch.Tensor | None], list[int | None]] | None:
        """The captured log-probs and their optimizer steps in local sample order; None where nothing was captured.

        A sample that the loss never saw has None.
        """
        if not self._values:
            return None
        positions = self.positions()
        return [self._values.get(position) for position in positions], [self._steps.get(p) for p in positions]

    def positions(self) -> list[int]:
        return list(self.rollout_data[self.key])

    def close(self) -> None:
        """Let go of every tensor."""
        self._values.clear()
        self._steps.clear()


def _identify(positions: Any, rollout_data: dict[str, Any]) -> bool:
    """Whether ``positions`` tell the local samples apart: one for each, none twice."""
    if positions is None:
        return False
    return len(positions) == len(set(positions)) == len(rollout_data["response_lengths"])


def current_session() -> CaptureSession | None:
    """The session of the ``train_actor`` call that this code runs in, or None."""
    return _SESSION.get()


def capturing() -> CaptureSession | None:
    """The current session while it takes log-probs: not once something failed, because its dump is lost already and one
    bad rollout must not count as many failures."""
    session = _SESSION.get()
    return None if session is None or session.failure is not None or not session.wanted else session


def enter(session: CaptureSession) -> Any:
    """Make ``session`` current; give the result to :func:`leave`."""
    return session, _SESSION.set(session)


def leave(handle: Any) -> None:
    """End the session that :func:`enter` made current and release what it holds, whatever was left open inside."""
    session, token = handle
    session.close()
    _POLICY_BATCH.set(None)  # a mark whose own end failed would keep its batch alive, and lend it to the next rollout
    _SESSION.reset(token)


def enter_policy_loss(batch: Any) -> Any:
    """Log-probs that appear from here on belong to ``batch``; give the result to :func:`leave_policy_loss`."""
    return _POLICY_BATCH.set(batch)


def leave_policy_loss(token: Any) -> None:
    _POLICY_BATCH.reset(token)


def policy_batch() -> Any:
    """The micro-batch whose policy loss is being computed, or None: ref, teacher and old-actor passes see None."""
    return _POLICY_BATCH.get()
