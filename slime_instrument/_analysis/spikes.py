"""Optimizer steps whose gradient norm stands out among those of the rollouts given, and the samples that carry it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.gradient import Gradient, SampleShare
from slime_instrument._format.dumps import Provenance
from slime_instrument._format.values import as_list, number, show, whole_number

__all__ = ["CODE", "spikes", "step_norms"]

CODE = "gradient-spike"

_NEAR = 8  # steps on each side that a step is held against: the norm moves as training goes on
_FEWEST = 4  # of those; with fewer nothing is ordinary
_TIMES = 3.0  # their median
_SCATTER = 5.0  # standard deviations of their logarithms
_CARRIES = 2.0  # times the largest pull that a sample has in an ordinary step
_LOOKED_INTO = 3  # spikes, the largest: each costs the derivatives of up to three rollouts
_SHOWN = 5


@dataclass(frozen=True)
class _Spike:
    rollout: int
    step: int
    norm: float
    ordinary: float

    @property
    def times(self) -> float:
        return self.norm / self.ordinary if math.isfinite(self.norm) else math.inf


def step_norms(provenance: Provenance) -> dict[int, float]:
    """Optimizer step within the rollout -> the norm of its gradient, as slime returned it."""
    found = {}
    for one in as_list(provenance.record.get("steps")) or ():
        if isinstance(one, Mapping):
            step, norm = whole_number(one.get("step")), number(one.get("grad_norm"))
            if step is not None and norm is not None:
                found[step] = norm
    return found


def spikes(
    norms: Sequence[Mapping[int, float]], names: Sequence[str], gradient_of: Callable[[int], Gradient]
) -> list[Finding]:
    """The steps that stand out, each with the samples that carry it; the largest first.

    They are told beside the verdict and do not decide it: the two sides of a dump may agree while a step is large.

    Args:
        norms: :func:`step_norms` of each rollout, in order.
        names: of the rollouts.
        gradient_of: the derivatives of one of them, by its place; asked only where a step stands out.
    """
    found = _standing_out(norms)
    known: dict[int, Gradient] = {}

    def gradient(rollout: int) -> Gradient:
        if rollout not in known:
            known[rollout] = gradient_of(rollout)
        return known[rollout]

    told = []
    for one in found[:_LOOKED_INTO]:
        near = [i for i in (one.rollout, one.rollout - 1, one.rollout + 1) if 0 <= i < len(norms)]
        others = [
            size
            for i in near
            for size in _sizes(gradient(i), without={spike.step for spike in found if spike.rollout == i}).values()
        ]
        told.append(_finding(one, names[one.rollout], gradient(one.rollout), max(others, default=None)))
    return told


def _standing_out(norms: Sequence[Mapping[int, float]]) -> list[_Spike]:
    series = [(i, step, norm) for i, steps in enumerate(norms) for step, norm in sorted(steps.items())]
    found = []
    for n, (i, step, norm) in enumerate(series):
        near = [value for _, _, value in series[max(0, n - _NEAR) : n] + series[n + 1 : n + 1 + _NEAR]]
        logs = [math.log(value) for value in near if 0 < value < math.inf]
        if len(logs) < _FEWEST:
            continue
        middle = median(logs)
        scatter = 1.4826 * median(abs(value - middle) for value in logs)
        if not math.isfinite(norm) or (
            norm > 0 and math.log(norm) - middle > max(math.log(_TIMES), _SCATTER * scatter)
        ):
            found.append(_Spike(i, step, norm, math.exp(middle)))
    return sorted(found, key=lambda one: -one.times)


def _sizes(gradient: Gradient, *, without: set[int]) -> dict[int, float]:
    """Σ|∂loss/∂log π| of each sample of the other steps."""
    kept = (one.position for one in gradient.shares if one.step not in without)
    return {position: float(gradient.tokens[position].abs().sum()) for position in kept}


def _finding(spike: _Spike, name: str, gradient: Gradient, ordinary: float | None) -> Finding:
    shares = [one for one in gradient.shares if one.step == spike.step]
    times = f", {spike.times:.3g} times that of the steps around it" if math.isfinite(spike.times) else ""
    message = f"{name}, optimizer step {spike.step}: grad_norm is {spike.norm:.3g}{times}."
    carrying: list[SampleShare] = []
    if not shares:
        reason = next(iter(gradient.unknown), "the dump holds no sample of it")
        message += f" Which samples carry it is not known: {reason}."
    elif ordinary is None:
        message += f" No ordinary step nearby is known to hold its samples against; the largest: {_told(shares[:1])}."
    else:
        sizes = {one.position: float(gradient.tokens[one.position].abs().sum()) for one in shares}
        carrying = [one for one in shares if not sizes[one.position] <= _CARRIES * ordinary]
        if 2 * len(carrying) > len(shares):
            message += (
                f" No sample carries more than its share: {len(carrying)} of {len(shares)} pull more than any sample "
                "of the steps around it."
            )
            carrying = []
        elif carrying:
            told = _told(carrying)
            message += f" {told[0].upper()}{told[1:]}: more than any sample of the steps around it."
        else:
            message += f" No sample carries more than its share; the largest: {_told(shares[:1])}."
    return Finding(
        CODE,
        message,
        tuple(sorted(one.position for one in carrying)),
        {
            "rollout": spike.rollout,
            "step": spike.step,
            "grad_norm": spike.norm,
            "ordinary": spike.ordinary,
            "shares": [one.as_dict() for one in (carrying or shares)[:_SHOWN]],
        },
    )


def _told(shares: Sequence[SampleShare]) -> str:
    together = sum(one.share for one in shares)
    if len(shares) == 1:
        return (
            f"position {shares[0].position} carries {together:.3g} of the step's Σ|∂loss/∂log π|, "
            f"{shares[0].times_ordinary:.3g} times an equal part"
        )
    return f"positions {show([one.position for one in shares])} carry {together:.3g} of the step's Σ|∂loss/∂log π|"
