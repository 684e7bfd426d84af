"""The debug dump of what was trained on."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch

from slime.utils.types import RolloutBatch


def save_debug_train_data(args: Namespace, *, rollout_id: int, rollout_data: RolloutBatch) -> None:
    """Every rank writes what it holds, shards and all, and says nothing about where it stands."""
    template = args.save_debug_train_data
    if template is None:
        return
    rank = torch.distributed.get_rank()
    path = Path(template.format(rollout_id=rollout_id, rank=rank))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": rollout_id, "rank": rank, "rollout_data": rollout_data}, path)
