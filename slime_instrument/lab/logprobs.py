"""Rollout log-probs that nearly agree with training: those of an earlier pass, rounded as an engine in bf16 would."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any


def rollout_log_probs_from(train_dumps: Iterable[Path], path: Path) -> Path:
    """Write ``{rollout_id: {position: [floats]}}``, rounded to bf16, from the v2 train dumps of an earlier pass.

    Positions are those in the rollout dump. They equal ``Sample.index`` in the default sample set, and unlike it stay
    unique when one rollout fans out into several samples.
    """
    import torch

    known: dict[int, dict[int, list[float]]] = {}
    for dump in train_dumps:
        payload: dict[str, Any] = torch.load(dump, map_location="cpu", weights_only=True)
        rollout = known.setdefault(int(payload["rollout_id"]), {})
        for sample in payload["samples"]:
            position = sample.get("rollout_position")
            key = sample["sample_index"] if position is None else position
            rollout[int(key)] = sample["log_probs"].float().bfloat16().float().tolist()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(known, path)
    return path
