"""Loading a data-parallel rank's share of a rollout."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import ray

from slime.utils.misc import Box
from slime.utils.types import RolloutBatch


def process_rollout_data(args: Namespace, rollout_data_ref: list[Box], dp_rank: int, dp_size: int) -> RolloutBatch:
    """Fetch this rank's box. Which positions of the batch it holds is used up here and goes no further."""
    assert len(rollout_data_ref) == dp_size
    rollout_data: dict[str, Any] = ray.get(rollout_data_ref[dp_rank].inner)
    partition = rollout_data.pop("partition")
    whole_batch = rollout_data["total_lengths"]
    rollout_data["total_lengths"] = [whole_batch[position] for position in partition]
    if "raw_reward" in rollout_data:
        rollout_data["local_raw_reward"] = [rollout_data["raw_reward"][position] for position in partition]
    return rollout_data
