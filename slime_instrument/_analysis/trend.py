"""Several rollouts: how the mismatch moves from one to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_instrument._analysis.compare import Comparison

_SERIES = ("ess", "k1", "k2", "k3", "token_mult_prob_error", "chi2_token", "n_tokens", "n_joined")


def trend(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Series over rollouts, in the order given: metrics, and which findings each rollout has."""
    return {
        "rollout_id": [one.rollout_id for one in comparisons],
        **{f"abs_diff_{name}": [one["abs_diff"][name] for one in comparisons] for name in ("mean", "p99", "max")},
        **{name: [one[name] for one in comparisons] for name in _SERIES},
        "findings": [[finding.code for finding in one.findings] for one in comparisons],
    }
