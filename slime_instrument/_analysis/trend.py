"""Several rollouts: how the mismatch moves from one to the next; and which patterns are more than chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from slime_instrument._analysis.compare import Comparison
from slime_instrument._analysis.drift import Bin
from slime_instrument._analysis.metrics import Metrics
from slime_instrument._analysis.statistics import log_student_tail

_SERIES = ("ess", "k1", "k2", "k3", "token_mult_prob_error", "chi2_token", "n_tokens", "n_joined")
_SURE = math.log(1e-3)  # log-probability of a pattern by chance from which it is said
_SMALLEST_STEP = 1.25  # factor
_SMALLEST_PATTERN = 1.25
_BETWEEN = 0.03  # by how much the level of rollouts may differ for no reason, in log |δ|


def trend(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Series over rollouts, in the order given: metrics, findings and verdicts of each, and a change of level."""
    step = step_in([one.metrics.abs_diff.mean for one in comparisons])
    return {
        "rollout_id": [one.rollout_id for one in comparisons],
        **{f"abs_diff_{name}": [one["abs_diff"][name] for one in comparisons] for name in ("mean", "p99", "max")},
        **{name: [one[name] for one in comparisons] for name in _SERIES},
        "findings": [[finding.code for finding in one.findings] for one in comparisons],
        "verdict": [one.verdict.level for one in comparisons],
        "step": None if step is None else {**asdict(step), "rollout_id": comparisons[step.at].rollout_id},
    }


@dataclass(frozen=True)
class Step:
    """A change of level in a series.

    Attributes:
        at: place of the first value on the new level.
        before, after: geometric means of the values before it and from it on.
        factor: after / before.
        chance: upper bound of the probability of such a step, anywhere in the series, by chance.
    """

    at: int
    before: float
    after: float
    factor: float
    chance: float


def step_in(values: Sequence[float | None]) -> Step | None:
    """The most certain change of level in a series of positive values, where it is more than chance.

    Compares the logarithms before and from each place on, by Student's t with the scatter on both sides, and counts
    how many places there were to choose from. None where the series is too short: at least four values.

    Args:
        values: in order; those that are None or not positive are left out.
    """
    known = [(i, math.log(value)) for i, value in enumerate(values) if value is not None and 0 < value < math.inf]
    n = len(known)
    if n < 4:
        return None
    logs = torch.tensor([value for _, value in known], dtype=torch.float64)
    best: tuple[float, int] | None = None
    for at in range(1, n):
        early, late = logs[:at], logs[at:]
        scatter = float((early - early.mean()).square().sum() + (late - late.mean()).square().sum()) / (n - 2)
        error = math.sqrt(max(scatter, _BETWEEN**2) * (1 / at + 1 / (n - at)))
        t = abs(float(late.mean() - early.mean())) / error
        chance = float(log_student_tail(torch.tensor(t), torch.tensor(float(n - 2)))) + math.log(n - 1)
        if best is None or chance < best[0]:
            best = (chance, at)
    assert best is not None
    chance, at = best
    before, after = math.exp(float(logs[:at].mean())), math.exp(float(logs[at:].mean()))
    if chance > math.log(0.01) or max(after / before, before / after) < _SMALLEST_STEP:
        return None
    return Step(known[at][0], before, after, after / before, min(1.0, math.exp(chance)))


def stands_out(groups: Sequence[Bin], metrics: Metrics) -> tuple[Bin, float] | None:
    """The group whose mean \\|δ\\| is most above that of the others, where it is more than chance for so many tokens.

    Args:
        groups: of :class:`~slime_instrument._analysis.drift.Drift`; together all comparable tokens.
        metrics: of the same comparison; the scatter of single tokens follows from its k2.

    Returns:
        The group, and mean \\|δ\\| of the others; None where no group stands out.
    """
    mean, k2 = metrics.abs_diff.mean, metrics.k2
    if len(groups) < 2 or mean is None or k2 is None or not math.isfinite(k2):
        return None
    scatter = math.sqrt(max(0.0, 2 * k2 - mean**2))
    total = sum(one.n_tokens for one in groups)
    best: tuple[float, Bin, float] | None = None
    for one in groups:
        others = total - one.n_tokens
        rest = sum(other.mean_abs * other.n_tokens for other in groups if other is not one) / others
        if one.mean_abs < _SMALLEST_PATTERN * rest or one.n_tokens < 2:
            continue
        error = scatter * math.sqrt(1 / one.n_tokens + 1 / others)
        t = (one.mean_abs - rest) / error if error else math.inf
        # Few tokens have few degrees of freedom: single outliers make a mean, too.
        df = torch.tensor(float(one.n_tokens - 1))
        chance = float(log_student_tail(torch.tensor(min(t, 1e6)), df)) + math.log(len(groups))
        if chance < _SURE and (best is None or chance < best[0]):
            best = (chance, one, rest)
    return None if best is None else best[1:]
