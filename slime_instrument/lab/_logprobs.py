"""Rollout log-probs that nearly agree with training: those of an earlier pass as an engine would have returned them.

An inference engine's kernels sum in another order and round what they sum. The log-probs themselves are float32: values
stored in bf16 would be a finding of their own (``dtype-rounding``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_instrument._errors import five_parts
from slime_instrument.lab._options import LabError

if TYPE_CHECKING:
    import torch

_KERNEL_NOISE = 2.0**-8
"""Standard deviation, relative to the log-prob: about one step of bf16."""


def rollout_log_probs_from(train_dumps: Iterable[Path], path: Path) -> Path:
    """Write ``{rollout_id: {position: [floats]}}`` from the v2 train dumps of an earlier pass, with seeded kernel
    noise.

    Positions are those in the rollout dump. They equal ``Sample.index`` in the default sample set, and unlike it stay
    unique when one rollout fans out into several samples.

    Raises:
        LabError: a dump lacks log-probs.
    """
    import torch

    known: dict[int, dict[int, list[float]]] = {}
    for dump in train_dumps:
        payload: dict[str, Any] = torch.load(dump, map_location="cpu", weights_only=True)
        rollout = known.setdefault(int(payload["rollout_id"]), {})
        for sample in payload["samples"]:
            if "log_probs" not in sample:
                raise LabError(_without_log_probs(dump, payload))
            position = sample.get("rollout_position")
            key = sample["sample_index"] if position is None else position
            rollout[int(key)] = _as_an_engine(sample["log_probs"].float(), seed=int(key)).tolist()
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(known, path)
    return path


def _without_log_probs(dump: Path, payload: Mapping[str, Any]) -> str:
    reasons = {shard.get("provenance", {}).get("log_probs") for shard in payload["dp_shards"]} - {None}
    return five_parts(
        f"lab: {dump.name} of the first pass",
        expected="log-probs in every sample",
        found="none" + (f" ({'; '.join(sorted(reasons))})" if reasons else ""),
        follows="Without them there is nothing to compare.",
        next_step="slime-instrument check --slime DIR says which part of this slime does not fit.",
    )


def _as_an_engine(log_probs: torch.Tensor, seed: int) -> torch.Tensor:
    import torch

    noise = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(seed))
    return (log_probs * (1 + _KERNEL_NOISE * noise)).clamp(max=0)
