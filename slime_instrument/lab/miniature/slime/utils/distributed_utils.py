"""The gloo group of all ranks, for what must not go through the training backend."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

_groups: list[Any] = []


def init_gloo_group() -> Any:
    _groups[:] = [dist.new_group(backend="gloo")]
    return _groups[0]


def get_gloo_group() -> Any:
    if not _groups:
        raise RuntimeError("init_gloo_group was not called")
    return _groups[0]
