"""What the hooks share: the armed process that they work in, and the first-seen log-probs of the training forward, by
sample. One session per ``train_actor`` call, no other state.

A session holds detached copies only: no autograd graph and no view of a buffer that the next micro-batch may overwrite.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from slime_instrument._patching.patch import Target
from slime_instrument._switch import package

if TYPE_CHECKING:
    import torch

    from slime_instrument._dump.dumper import Dumper
    from slime_instrument._patching.patch import Call
    from slime_instrument._patching.patcher import Patcher

POSITION_KEY = "partition"
"""slime's own name for each local sample's position in the rollout; what travels inside the micro-batch."""
LOCAL_KEY = "_slime_instrument_local"
"""Stand-in key where the positions are not known: the index among the local samples."""

NATIVE_CAPTURE = Target.parse(f"{package()}.backends.megatron_utils.loss:enable_log_prob_capture")
"""slime's own capture of log-probs, since #2266. It finds the samples by their positions, which slime keeps for it."""

T = TypeVar("T")


@dataclass(frozen=True)
class Loaded:
    """How the loader came by the samples' positions: "partition" is slime's own word, "reconstructed" was worked out
    and proven (v0.2.0), "unknown" that there are none. ``added``: we put them into ``rollout_data``."""

    positions_from: str = "unknown"
    added: bool = False


class Process(Protocol):
    """``call.process`` of every hook; :class:`slime_instrument._runtime.Runtime` is one.

    ``route``: how it was armed, in words. ``args``: slime's arguments, once its trainer was started with them.
    ``loaded``: what the newest load left.
    """

    route: str
    args: Any
    loaded: Loaded
    patcher: Patcher
    dumper: Dumper

    def refuse_bad_settings(self) -> None: ...

    def training_started(self, args: Any) -> None:
        """Megatron is up and all that slime imports has been imported."""

    def take_failures(self) -> dict[str, str]:
        """Patch name -> what failed there while no capture session was open; forgotten here afterwards."""

    def rollout_ended(self, session: CaptureSession) -> None:
        """The ``train_actor`` call of ``session`` is over."""


def arguments(call: Call) -> Any:
    """slime's arguments: those of the call, else those that the trainer was started with; None before it was."""
    return call.get("args", call.process.args)


def dump_is_asked_for(args: Any) -> bool:
    """By ``--save-debug-train-data``, or ``--dump-details``, which sets the same argument."""
    return getattr(args, "save_debug_train_data", None) is not None


class _Opened(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value: T | None = value


class Scope(Generic[T]):
    """A value that belongs to the code inside a ``with`` block.

    It is found through a context variable, so that threads and nested blocks each see their own. Code inside the block
    that runs in another thread or in a fresh context sees it too, as long as it is the only one open in this process.
    """

    def __init__(self, name: str) -> None:
        self._here: ContextVar[_Opened[T] | None] = ContextVar(f"slime_instrument_{name}", default=None)
        self._open: dict[int, _Opened[T]] = {}

    def current(self) -> T | None:
        if not self._open:
            return None
        here = self._here.get()
        if here is not None and here.value is not None:
            return here.value
        if len(self._open) == 1:
            return next((only.value for only in tuple(self._open.values())), None)
        return None

    @contextmanager
    def opened(self, value: T) -> Iterator[None]:
        opened = _Opened(value)
        self._open[id(opened)] = opened
        token = self._here.set(opened)
        try:
            yield
        finally:
            del self._open[id(opened)]
            opened.value = None  # for contexts that were copied inside the block and live on
            self._here.reset(token)


def one_for_each_sample(key: str, rollout_data: Mapping[str, Any]) -> bool:
    """Whether ``rollout_data`` has an entry of ``key`` for each sample. A hook of the user's may have dropped some."""
    try:
        return len(rollout_data[key]) == len(rollout_data["response_lengths"])
    except (KeyError, TypeError):
        return False


class CaptureSession:
    """What one ``train_actor`` call leaves for its dump.

    ``rollout_data`` is slime's dict of per-sample lists for this data-parallel rank. ``wanted`` is False where slime
    computes the log-probs itself: then nothing is copied.
    """

    def __init__(self, rollout_id: int, rollout_data: dict[str, Any], loaded: Loaded | None = None) -> None:
        self.rollout_id = rollout_id
        self.rollout_data = rollout_data
        self.loaded = Loaded() if loaded is None else loaded
        self.came_with_rollout = frozenset(rollout_data)
        whole = one_for_each_sample(POSITION_KEY, rollout_data)
        unique = whole and len(set(rollout_data[POSITION_KEY])) == len(rollout_data[POSITION_KEY])
        self.key = POSITION_KEY if unique else LOCAL_KEY  # what tells the samples apart
        self.failure: str | None = None
        """Why a part of this rollout is missing, where one is: then its dump is not written at all."""
        self.optimizer_step: int | None = None
        self.step_results: list[tuple[int | None, Any, Any]] = []
        """Of each optimizer step: its number, slime's dict of losses and the gradient's norm, as slime returns them."""
        self.losses = 0
        """How many policy losses were computed."""
        self.weight_version: int | None = None
        self._added = {POSITION_KEY} if self.loaded.added else set()
        self._had_log_probs = True
        self._values: dict[int, torch.Tensor] = {}
        self._steps: dict[int, int | None] = {}

    @property
    def wanted(self) -> bool:
        return self.rollout_data.get("log_probs") is None

    @property
    def captured_by_slime(self) -> bool:
        """Whether slime itself added log-probs from the training forward, as it does since #2266."""
        return not self._had_log_probs and not self.wanted

    def number_samples(self) -> None:
        """Put :data:`LOCAL_KEY` into ``rollout_data``, until :meth:`close`."""
        if LOCAL_KEY not in self.rollout_data:
            self.rollout_data[LOCAL_KEY] = list(range(len(self.rollout_data["response_lengths"])))
            self._added.add(LOCAL_KEY)

    def fail(self, reason: str) -> None:
        """Something of ours failed: there will be no dump, nothing more is taken, and ``rollout_data`` is slime's own
        again. A key of ours that slime's metrics found on this rank alone would end the training."""
        self.failure = self.failure or reason
        self._take_back(self._added)

    def begin_training(self) -> None:
        """The forward passes before the first optimizer step are over; what they computed is in ``rollout_data``."""
        if self.optimizer_step is None:
            self._had_log_probs = not self.wanted

    def begin_step(self, step: int) -> None:
        """The optimizer step ``step`` of this rollout begins."""
        self.begin_training()
        self.optimizer_step = step

    def end_step(self, losses: Any, grad_norm: Any) -> None:
        """The optimizer step ended with these. They are looked at when the dump is made: a number on a device would
        have to be waited for here."""
        self.step_results.append((self.optimizer_step, losses, grad_norm))

    def capture(self, positions: Sequence[int], log_probs: Sequence[torch.Tensor]) -> None:
        """Keep each sample's log-probs (shape ``(local response tokens,)``) unless the sample was seen before.

        One device operation for the micro-batch: the per-sample tensors are copied as one and cut into views. Tensors
        that do not go together are copied each. Raises ValueError when positions and log-probs differ in number.
        """
        if len(positions) != len(log_probs):
            raise ValueError(f"{len(positions)} positions for {len(log_probs)} log-prob tensors in one micro-batch")
        if all(position in self._values for position in positions):
            return
        import torch

        from slime_instrument._dump.contribute import undisturbed

        # Plain tensors come out whatever mode the caller is in: one of inference mode cannot be worked on later.
        with undisturbed(), torch.inference_mode(False), torch.no_grad():
            values = [value.detach() for value in log_probs]
            if len({(value.dtype, value.device, value.shape[1:]) for value in values}) == 1 and values[0].dim() > 0:
                copied: Sequence[torch.Tensor] = torch.split(torch.cat(values), [len(value) for value in values])
            else:
                copied = [value.clone() for value in values]
        for position, value in zip(positions, copied, strict=True):
            if position not in self._values:
                self._values[position] = value
                self._steps[position] = self.optimizer_step

    def collected(
        self, positions: Sequence[Any] | None = None
    ) -> tuple[list[torch.Tensor | None], list[int | None]] | None:
        """The captured log-probs and their optimizer steps, of each sample; None where nothing of them was captured.

        ``positions``: of the samples that are dumped, where they are not all of the session's. A sample that the loss
        never saw has None.
        """
        # Copied, because a dump on another thread may still be under way when the session is closed.
        values, steps = dict(self._values), dict(self._steps)
        if not values:
            return None
        wanted = list(self.rollout_data[self.key] if positions is None else positions)
        if not any(position in values for position in wanted):
            return None
        return [values.get(position) for position in wanted], [steps.get(position) for position in wanted]

    def close(self) -> None:
        """Let go of every tensor, and of our own key."""
        self._values.clear()
        self._steps.clear()
        self.step_results.clear()
        self._take_back(self._added & {LOCAL_KEY})

    def _take_back(self, keys: set[str]) -> None:
        for key in keys:
            self.rollout_data.pop(key, None)


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss that is being computed: log-probs that appear meanwhile belong to ``batch``."""

    session: CaptureSession
    batch: Any


SESSIONS: Scope[CaptureSession] = Scope("session")
POLICY_LOSSES: Scope[PolicyLoss] = Scope("policy_loss")


def current_session() -> CaptureSession | None:
    """The session of the ``train_actor`` call that this code runs in, or None."""
    return SESSIONS.current()


def capturing() -> CaptureSession | None:
    """The current session while it takes log-probs: not once something failed, because its dump is lost already and one
    bad rollout must not count as many failures."""
    session = SESSIONS.current()
    return None if session is None or session.failure is not None or not session.wanted else session


def policy_loss() -> PolicyLoss | None:
    """The policy loss that is being computed, or None: ref, teacher and old-actor passes see None.

    One that belongs to another session is none of this code's, though it may be the only one open in the process.
    """
    loss = POLICY_LOSSES.current()
    return None if loss is None or loss.session is not SESSIONS.current() else loss


def dict_with(key: str, value: Any) -> dict[str, Any] | None:
    """The dict that holds ``key``: ``value`` itself, or a member of a tuple or list. None where there is none."""
    candidates = value if isinstance(value, (tuple, list)) else (value,)
    return next((each for each in candidates if isinstance(each, dict) and key in each), None)
