"""Faults that a run can be made to have, so that people see how each shows in compare and in the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime_instrument._errors import five_parts
from slime_instrument.lab._options import LabError


@dataclass(frozen=True)
class Fault:
    """``value``: a number whose meaning depends on the fault."""

    name: str
    value: float


@dataclass(frozen=True)
class Kind:
    """``text``: what is done. ``default``: the value where none is given; ``expected``: what it may be, in words.
    ``in_engine``, ``in_training``: whether it belongs into the run whose log-probs become the rollout's, and into the
    training that uses them."""

    text: str
    default: float
    expected: str
    in_range: Callable[[float], bool]
    in_engine: bool
    in_training: bool


#: The faults by name.
FAULTS = {
    "stale-weights": Kind(
        "from rollout VALUE on the engine keeps the weights that it had one rollout before",
        1,
        "the number of a rollout, 1 or more",
        lambda value: value >= 1 and value == int(value),
        in_engine=True,
        in_training=False,
    ),
    "temperature": Kind(
        "the engine's log-probs are those at temperature VALUE, training's those at 1",
        0.7,
        "a number above 0 other than 1",
        lambda value: 0 < value < float("inf") and value != 1,
        in_engine=True,
        in_training=False,
    ),
    "sample-swap": Kind(
        "from rollout VALUE on two samples have each other's rollout log-probs",
        0,
        "the number of a rollout",
        lambda value: value >= 0 and value == int(value),
        in_engine=True,  # whose samples must have the same lengths
        in_training=True,
    ),
    "mask-shift": Kind(
        "from rollout VALUE on training's loss mask lies one token behind the rollout's",
        0,
        "the number of a rollout",
        lambda value: value >= 0 and value == int(value),
        in_engine=False,
        in_training=True,
    ),
}


def parse_fault(text: str | None) -> Fault | None:
    """``NAME`` or ``NAME:VALUE``; LabError for anything else."""
    if text is None:
        return None
    name, colon, number = text.partition(":")
    kind = FAULTS.get(name)
    if kind is None:
        raise _refused(f"one of {', '.join(FAULTS)}", repr(name))
    try:
        value = float(number) if colon else kind.default
    except ValueError:
        raise _refused(kind.expected, repr(number)) from None
    if not kind.in_range(value):
        raise _refused(kind.expected, repr(number))
    return Fault(name, value)


def _refused(expected: str, found: str) -> LabError:
    return LabError(
        five_parts(
            "lab fault",
            expected=expected,
            found=found,
            follows="Nothing was trained.",
            next_step="Write NAME or NAME:VALUE.",
        )
    )


def swap_rollout_log_probs(samples: Sequence[Any]) -> None:
    """Exchange those of the first two samples that have responses of one length. They are made so that there are."""
    by_length: dict[int, Any] = {}
    for sample in samples:
        other = by_length.setdefault(sample.response_length, sample)
        if other is not sample:
            other.rollout_log_probs, sample.rollout_log_probs = sample.rollout_log_probs, other.rollout_log_probs
            return


def shift_masks(samples: Sequence[Any]) -> None:
    """Move each loss mask one token towards the end; what falls off comes in at the start."""
    for sample in samples:
        sample.loss_mask = [*sample.loss_mask[-1:], *sample.loss_mask[:-1]]


class StandingStill:
    """Keeps a model at the weights of one moment, whatever its optimizer does in between."""

    def __init__(self, named: Callable[[], Any]) -> None:
        self._named = named
        self._kept = {name: parameter.detach().clone() for name, parameter in named()}

    def restore(self) -> None:
        import torch

        with torch.no_grad():
            for name, parameter in self._named():
                parameter.copy_(self._kept[name])
