"""What is looked for in a pair of dumps, and in which order: :data:`KINDS`, then :data:`LAST`.

Lower orders come first, and the tokens that they explain are hidden from higher ones, so that one fault has one name.
Findings of equal order see the same tokens: where both fit, both are said. A finding may ask another whether its cause
fits, where both would look alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from slime_instrument._analysis.diagnosis import Finding, View
from slime_instrument._analysis.findings.facts import (
    mask_differs,
    missing_log_probs,
    positive_log_probs,
    rollout_log_probs_differ,
)
from slime_instrument._analysis.findings.misplaced import cp_boundary, mask_shift, rank_order, sample_swap, token_shift
from slime_instrument._analysis.findings.missing import incomplete, join_unconfirmed, non_finite, zero_fill
from slime_instrument._analysis.findings.model import (
    context_differs,
    dtype_rounding,
    low_probability_tail,
    stale_weights,
)
from slime_instrument._analysis.findings.sampling import sampling_penalty, temperature, truncated_sampling
from slime_instrument._analysis.findings.unexplained import single_tokens, unexplained_mismatch

__all__ = ["KINDS", "LAST", "Kind", "diagnose"]


@dataclass(frozen=True)
class Kind:
    """A kind of finding.

    Attributes:
        code: its name.
        order: when it is looked for; see above.
        find: looks for it; None where the data does not show it.
    """

    code: str
    order: int
    find: Callable[[View], Finding | None]


KINDS = (
    Kind("missing-log-probs", 0, missing_log_probs),
    Kind("positive-log-probs", 0, positive_log_probs),
    Kind("cp-boundary", 0, rank_order),
    Kind("incomplete", 10, incomplete),
    Kind("join-unconfirmed", 20, join_unconfirmed),
    Kind("sample-swap", 20, sample_swap),
    Kind("non-finite", 30, non_finite),
    Kind("mask-shift", 40, mask_shift),
    Kind("token-shift", 45, token_shift),
    Kind("zero-fill", 50, zero_fill),
    Kind("cp-boundary", 70, cp_boundary),
    Kind("stale-weights", 72, stale_weights),
    Kind("dtype-rounding", 75, dtype_rounding),
    Kind("sampling-penalty", 80, sampling_penalty),
    Kind("temperature", 80, temperature),
    Kind("truncated-sampling", 80, truncated_sampling),
    Kind("context-differs", 85, context_differs),
    Kind("low-probability-tail", 95, low_probability_tail),
    Kind("unexplained-mismatch", 99, unexplained_mismatch),
)
"""In the order in which they are looked for."""

LAST: tuple[Callable[[View, Sequence[Finding]], Finding | None], ...] = (
    rollout_log_probs_differ,
    mask_differs,
    single_tokens,
)
"""These look at all tokens, and at the other findings, which may have a better name for the same.

Single tokens come last, because they are no news in a sample that already has a finding.
"""


def diagnose(view: View) -> tuple[Finding, ...]:
    """Every finding that the data shows; none on a clean pair."""
    findings: list[Finding] = []
    left = view
    for _, kinds in groupby(KINDS, key=lambda kind: kind.order):
        found = [finding for kind in kinds if (finding := kind.find(left)) is not None]
        findings += found
        for finding in found:
            if finding.tokens is not None:
                explained = finding.tokens if left.explained is None else left.explained | finding.tokens
                left = replace(left, explained=explained, memo={})
    for find in LAST:
        finding = find(view, findings)
        findings += [] if finding is None else [finding]
    return tuple(findings)
