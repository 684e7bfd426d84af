"""Synthetic rollout samples, built from the target's own ``Sample``; the same on every layout.

``default`` has one sample of 5 to 30 tokens per rollout; ``long`` has responses of which each of two context-parallel
ranks owns a part; ``uneven`` one sample more than the ranks divide. ``edge`` has those that break careless code, by the
names in :data:`EDGE_KINDS`; ``edge:fan-out,masked`` only these, filled up with plain ones. ``no-prompt`` must be named:
slime cannot train it in a single process.
"""

from __future__ import annotations

import importlib
import inspect
import random
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slime_instrument._errors import five_parts
from slime_instrument.lab import _extras
from slime_instrument.lab._options import LabError


@dataclass(frozen=True)
class Shape:
    """What the model does not decide about one sample. ``kind`` is "" for a plain one."""

    prompt: int
    response: int
    index: int | None
    rollout: int | None
    kind: str = ""


#: The sample kinds of the edge set, and what each is.
EDGE_KINDS = {
    "zero-response": "a response of no token",
    "one-token": "a response of one token",
    "other-rank": "a response wholly on another context-parallel rank",
    "masked": "every token masked out of the loss",
    "removed": "remove_sample, so that slime masks it",
    "fan-out": "several training samples of one rollout, with one index, not side by side",
    "no-index": "neither index nor rollout id",
    "no-prompt": "a response without a prompt",
    "dropped": "in the rollout dump, but not trained: a rollout too many for the batch",
}

# In the order of the rollout. Sixteen samples of eight rollouts, eight of them in the first four: two steps and four
# data-parallel ranks divide them. Behind them the two that are named only, or dropped.
_EDGE = (
    Shape(6, 0, 0, 0, "zero-response"),
    Shape(5, 1, 1, 1, "one-token"),
    Shape(29, 2, 2, 2, "other-rank"),
    Shape(7, 12, 3, 3, "masked"),
    Shape(9, 5, 3, 3, "removed"),
    Shape(4, 9, 0, 0, "fan-out"),
    Shape(8, 5, 0, 0, "fan-out"),
    Shape(10, 6, 1, 1, "fan-out"),
    Shape(3, 17, None, None, "no-index"),
    Shape(21, 3, 5, 5),
    Shape(12, 8, 6, 6),
    Shape(1, 7, 7, 7),
    Shape(2, 11, 7, 7, "fan-out"),
    Shape(3, 14, 5, 5, "fan-out"),
    Shape(11, 2, 6, 6, "fan-out"),
    Shape(6, 13, 7, 7, "fan-out"),
    Shape(0, 4, 8, 8, "no-prompt"),
    Shape(5, 6, 9, 9, "dropped"),
)


_PLAIN_SETS = ("default", "long", "uneven")


def edge_kinds(name: str) -> frozenset[str] | None:
    """The kinds that the set ``name`` has; None for a set of plain samples. LabError for a name that means nothing."""
    if name in _PLAIN_SETS:
        return None
    head, _, listed = name.partition(":")
    kinds = frozenset(filter(None, listed.split(","))) or frozenset(EDGE_KINDS) - {"no-prompt"}
    if head != "edge" or kinds - set(EDGE_KINDS):
        raise LabError(
            five_parts(
                "lab samples",
                expected=f"{', '.join(_PLAIN_SETS)}, edge, or edge: and kinds among {', '.join(EDGE_KINDS)}",
                found=repr(name),
                follows="Nothing was trained.",
                next_step="Choose one of these.",
            )
        )
    return kinds


def sample_shapes(name: str, rng: random.Random, count: int) -> list[Shape]:
    """The set's samples in order. ``count`` is how many the default set has."""
    kinds = edge_kinds(name)
    if kinds is None:
        least = 13 if name == "long" else 2
        shapes = [Shape(rng.randint(3, 9), rng.randint(least, 21), index, index) for index in range(count)]
        # One rollout fans out, so that the number of rollouts still divides.
        return [*shapes, Shape(5, 7, count - 1, count - 1)] if name == "uneven" else shapes
    kept = [shape for shape in _EDGE if not shape.kind or shape.kind in kinds]
    if "fan-out" not in kinds:
        kept = [shape if shape.rollout is None else replace(shape, index=n, rollout=n) for n, shape in enumerate(kept)]
    trained = [shape for shape in kept if shape.kind != "dropped"]
    return [*trained, *_filling(trained), *(shape for shape in kept if shape.kind == "dropped")]


def _filling(trained: list[Shape]) -> list[Shape]:
    """Plain samples that make four divide the number of rollouts, then of samples: ranks and steps must."""
    rollouts = len({shape.rollout for shape in trained})  # at most one sample has none
    alone = [Shape(4 + number, 6 + number, 90 + number, 90 + number) for number in range(-rollouts % 4)]
    together = [Shape(5, 3 + number, 7, 7) for number in range(-(len(trained) + len(alone)) % 4)]
    return [*alone, *together]


def batch_size(name: str, count: int, *, in_rollouts: bool) -> int:
    """What one step over all that is trained counts: rollouts since v0.3.0, samples before."""
    shapes = [shape for shape in sample_shapes(name, random.Random(0), count) if shape.kind != "dropped"]
    if not in_rollouts:
        return count if name == "uneven" else len(shapes)
    named = {shape.rollout for shape in shapes if shape.rollout is not None}
    return len(named) + sum(shape.rollout is None for shape in shapes)


def make_samples(
    args: Namespace,
    name: str,
    rollout_id: int,
    known: Mapping[int, Sequence[float]] | None = None,
    *,
    extra: Sequence[str] = (),
    keep_dropped: bool = True,
    two_of_one_length: bool = False,
) -> list[Any]:
    """The samples of one rollout. ``known``: log-probs by position from an earlier run; without it they are noise.

    ``keep_dropped``: whether those are among them that slime itself will drop. ``two_of_one_length``: whether the
    second response gets the length of the first.
    """
    from slime.utils.types import Sample

    rng = random.Random(rollout_id)
    samples = []
    shapes = sample_shapes(name, rng, args.rollout_batch_size * args.n_samples_per_prompt)
    if two_of_one_length:
        shapes[1] = replace(shapes[1], response=shapes[0].response)
    for position, shape in enumerate(shapes):
        sample = Sample(
            index=shape.index,
            prompt="x",
            tokens=[rng.randrange(args.vocab_size) for _ in range(shape.prompt + shape.response)],
            response_length=shape.response,
            reward=float(rng.random() < 0.5),
            status=Sample.Status.COMPLETED,
        )
        noise = [-rng.random() * 4 for _ in range(shape.response)]
        sample.rollout_log_probs = noise if known is None else list(known.get(position, noise))
        sample.loss_mask = [int(rng.random() < 0.9) * (shape.kind != "masked") for _ in range(shape.response)]
        later = {"remove_sample": shape.kind == "removed", "rollout_id": shape.rollout, "group_id": shape.rollout}
        for field, value in later.items():
            if field in Sample.__dataclass_fields__:  # a release that lacks one refuses it when it loads the dump
                setattr(sample, field, value)
        sample.group_index = position // args.n_samples_per_prompt
        _extras.add_to(sample, args, position, extra)
        if keep_dropped or shape.kind != "dropped":
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
    manager.custom_convert_samples_to_train_data_func = _custom(args, "custom_convert_samples_to_train_data_path")
    manager.custom_reward_post_process_func = _custom(args, "custom_reward_post_process_path")
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


def _custom(args: Namespace, name: str) -> Any:
    path = getattr(args, name, None)
    if path is None:
        return None
    module, _, attribute = path.rpartition(".")
    return getattr(importlib.import_module(module), attribute)
