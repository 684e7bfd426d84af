"""A rank hook: this run logs for real. The lab otherwise records what slime would log and starts no tracker."""

from __future__ import annotations

import sys
from typing import Any

import torch

_LOGGERS = ("slime.observability.logging_utils", "slime.utils.logging_utils", "slime.utils.tracking_utils")


def use_real_trackers(_rank: int, actor_module: Any, args: Any) -> None:
    """Put slime's own log function back, at the moment when slime starts its trackers."""
    originals = {name: sys.modules[name].log for name in _LOGGERS if hasattr(sys.modules.get(name), "log")}
    start, end = actor_module.init_tracking, torch.distributed.destroy_process_group

    def start_for_real(*positional: Any, **named: Any) -> None:
        for name, log in originals.items():
            sys.modules[name].log = log  # type: ignore[attr-defined]
        start(*positional, **named)

    def end_trackers_first(*positional: Any, **named: Any) -> None:
        # wandb writes in a process of its own, which is killed with the run unless it is told to finish.
        wandb = sys.modules.get("wandb")
        if wandb is not None and wandb.run is not None:
            wandb.finish()
        end(*positional, **named)

    actor_module.init_tracking = start_for_real
    torch.distributed.destroy_process_group = end_trackers_first  # type: ignore[assignment]
    # Read by some releases only; the lab has no parser that gives them defaults.
    for name in ("wandb_key", "wandb_host", "wandb_team", "sglang_enable_metrics"):
        setattr(args, name, None)
