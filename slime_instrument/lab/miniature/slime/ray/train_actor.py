"""The base of every training actor."""

from __future__ import annotations

from argparse import Namespace
from datetime import timedelta

import torch
import torch.distributed as dist

from slime.utils.distributed_utils import init_gloo_group


class TrainRayActor:
    args: Namespace
    role: str

    def __init__(self, world_size: int, rank: int) -> None:
        self._world_size = world_size
        self._rank = rank

    def init(self, args: Namespace, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int | None:
        self.args = args
        self.role = role
        self.with_ref = with_ref
        self.with_opd_teacher = with_opd_teacher
        torch.cuda.set_device("cuda:0")
        dist.init_process_group(
            backend=args.distributed_backend, timeout=timedelta(minutes=args.distributed_timeout_minutes)
        )
        init_gloo_group()
        args.rank = dist.get_rank()
        args.world_size = dist.get_world_size()
        return None
