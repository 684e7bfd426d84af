"""Synthetic rollout samples, built from the target's own ``Sample``; the same on every layout.

``default`` has one sample of 5 to 30 tokens per rollout. ``edge`` has those that break careless code: see
:func:`_edge_shapes`.
"""

from __future__ import annotations

import inspect
import random
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_instrument.lab.arguments import VOCABULARY


@dataclass(frozen=True)
class Shape:
    """What the model does not decide about one sample."""

    prompt: int
    response: int
    index: int | None
    rollout: int | None
    masked: bool = False
    """Whether every token is masked out of the loss."""


SETS = ("default", "edge")


def sample_shapes(kind: str, rng: random.Random, count: int) -> list[Shape]:
    if kind == "default":
        return [Shape(rng.randint(3, 9), rng.randint(2, 21), index, index) for index in range(count)]
    return _edge_shapes()


def _edge_shapes() -> list[Shape]:
    """Twelve samples of eight rollouts, eight of them in the first four: two steps and four ranks divide them.

    Responses of none and of one token; behind a prompt so long that a context-parallel rank owns none of them; masked
    throughout; a prompt of one token; two rollouts that fan out into three samples, not side by side; one sample
    without index.
    """
    return [
        Shape(prompt=6, response=0, index=0, rollout=0),
        Shape(prompt=5, response=1, index=1, rollout=1),
        Shape(prompt=29, response=2, index=2, rollout=2),
        Shape(prompt=7, response=12, index=3, rollout=3, masked=True),
        Shape(prompt=4, response=9, index=0, rollout=0),
        Shape(prompt=8, response=5, index=0, rollout=0),
        Shape(prompt=10, response=6, index=1, rollout=1),
        Shape(prompt=3, response=14, index=1, rollout=1),
        Shape(prompt=3, response=17, index=None, rollout=None),
        Shape(prompt=21, response=3, index=5, rollout=5),
        Shape(prompt=12, response=8, index=6, rollout=6),
        Shape(prompt=1, response=7, index=7, rollout=7),
    ]


def rollouts_in(kind: str, count: int) -> int:
    """How many rollouts the set has: slime counts its batches in them, not in samples."""
    shapes = sample_shapes(kind, random.Random(0), count)
    named = {shape.rollout for shape in shapes if shape.rollout is not None}
    return len(named) + sum(shape.rollout is None for shape in shapes)


def make_samples(
    args: Namespace, kind: str, rollout_id: int, known: Mapping[int, Sequence[float]] | None = None
) -> list[Any]:
    """The samples of one rollout. ``known``: log-probs by position from an earlier run; without it they are noise."""
    from slime.utils.types import Sample

    rng = random.Random(rollout_id)
    samples = []
    for position, shape in enumerate(sample_shapes(kind, rng, args.rollout_batch_size * args.n_samples_per_prompt)):
        sample = Sample(
            index=shape.index,
            prompt="x",
            tokens=[rng.randrange(VOCABULARY) for _ in range(shape.prompt + shape.response)],
            response_length=shape.response,
            reward=float(rng.random() < 0.5),
            status=Sample.Status.COMPLETED,
        )
        noise = [-rng.random() * 4 for _ in range(shape.response)]
        sample.rollout_log_probs = noise if known is None else list(known[position])
        sample.loss_mask = [int(rng.random() < 0.9) * (not shape.masked) for _ in range(shape.response)]
        sample.rollout_id = shape.rollout
        sample.group_index = position // args.n_samples_per_prompt
        samples.append(sample)
    return samples


def save_rollout_dump(args: Namespace, samples: Sequence[Any], rollout_id: int) -> None:
    """The rollout debug dump, as slime's rollout manager writes it."""
    import torch

    path = Path(args.save_debug_rollout_data.format(rollout_id=rollout_id))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": rollout_id, "samples": [sample.to_dict() for sample in samples]}, path)


def split_for_training(args: Namespace, parallel: Mapping[str, Any], samples: Sequence[Any], rollout_id: int) -> Any:
    """Convert samples with the target's own code; one box per data-parallel rank (one in all at v0.2.0)."""
    import ray
    from slime.ray.rollout import RolloutManager

    # The manager's __init__ starts Ray actors and engines; converting and splitting need neither.
    metadata = getattr(RolloutManager, "__ray_metadata__", None)
    manager: Any = object.__new__(metadata.modified_class if metadata else RolloutManager)
    manager.args, manager.train_parallel_config, manager.rollout_id = args, dict(parallel), rollout_id
    manager.custom_convert_samples_to_train_data_func = manager.custom_reward_post_process_func = None
    data = manager._convert_samples_to_train_data(samples)
    split = getattr(manager, "_split_train_data_by_dp", None)
    if split is None:
        try:
            from slime.utils.misc import Box
        except ImportError:
            from slime.utils.ray_utils import Box
        return Box(ray.put(data))
    if "dp_size" in inspect.signature(split).parameters:
        return split(data, parallel["dp_size"])
    return split(data)
