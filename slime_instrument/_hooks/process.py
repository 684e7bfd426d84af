"""What a hook may ask of the armed process that it works in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from slime_instrument._dump.dumper import Dumper
    from slime_instrument._hooks.capture import CaptureSession
    from slime_instrument._patching.patch import Call
    from slime_instrument._patching.patcher import Patcher


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
