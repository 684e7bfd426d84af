"""v0.2.0 ships one box to all ranks and cuts it locally, without naming positions: work out the same cut.

Either every ``dp_size``-th sample, or groups of samples balanced by length with slime's own function. The result is
proven against the lengths that the rank ended up with; where it cannot be proven, nothing is claimed, and the dump
orders its samples by sample index instead.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["reconstruct"]


def reconstruct(args: Any, rollout_data: dict[str, Any], dp_rank: int, dp_size: int) -> list[int] | None:
    """The rollout position of each local sample, or None where the cut is not known."""
    lengths = _whole_batch_lengths()
    if lengths is None:
        return None
    if getattr(args, "balance_data", False):
        positions = _balanced(lengths, getattr(args, "n_samples_per_prompt", 1), dp_rank, dp_size)
    else:
        positions = list(range(dp_rank, len(lengths), dp_size))
    if positions is None or [lengths[p] for p in positions] != list(rollout_data["total_lengths"]):
        return None
    return positions


def _whole_batch_lengths() -> list[int] | None:
    """slime's timer keeps the lengths of the whole batch, for its throughput figures."""
    timer = getattr(sys.modules.get("slime.utils.timer"), "Timer", None)
    lengths = getattr(timer(), "seq_lens", None) if timer is not None else None
    return None if lengths is None else [int(length) for length in lengths]


def _balanced(lengths: list[int], per_prompt: int, dp_rank: int, dp_size: int) -> list[int] | None:
    balance = getattr(sys.modules.get("slime.utils.data"), "get_seqlen_balanced_partitions", None)
    if balance is None:
        return None
    # Samples beyond the last whole group are on no rank.
    starts = range(0, len(lengths) - per_prompt + 1, per_prompt)
    groups = [sum(lengths[start : start + per_prompt]) for start in starts]
    mine = balance(groups, dp_size, equal_size=True)[dp_rank]
    return [group * per_prompt + offset for group in mine for offset in range(per_prompt)]
