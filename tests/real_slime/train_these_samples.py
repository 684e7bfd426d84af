"""A plugin for the lab: trains the samples of a rollout dump, loaded by slime's own --load-debug-rollout-data."""

from __future__ import annotations

import os
from typing import Any


def before_slime() -> None:
    from slime_instrument.lab import _samples

    def from_file(args: Any, _name: str, rollout_id: int, *_: Any, **__: Any) -> list[Any]:
        from slime.ray.rollout import RolloutManager

        metadata = getattr(RolloutManager, "__ray_metadata__", None)
        manager: Any = object.__new__(metadata.modified_class if metadata else RolloutManager)
        manager.args = args
        args.load_debug_rollout_data, args.load_debug_rollout_data_subsample = os.environ["EXTRACT"], None
        samples, _ = manager._get_rollout_data(rollout_id)
        return list(samples)

    _samples.__dict__["make_samples"] = from_file
