"""Which data-parallel rank trains which samples, in which micro-batches and optimizer steps."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

Schedule = tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]


def build_dp_schedule(
    args: Namespace,
    train_parallel_config: dict[str, Any],
    total_lengths: list[int],
    *,
    global_batch_size: int,
    rollout_indices: list[int],
) -> Schedule:
    """Return partitions, micro-batch indices (both per rank), micro-batches per step and rollouts per step.

    A step holds ``global_batch_size`` rollouts with all their samples. Rollouts that fill no step are dropped.
    """
    dp_size = train_parallel_config["dp_size"]
    samples_of: dict[int, list[int]] = {}
    for position, rollout in enumerate(rollout_indices):
        samples_of.setdefault(rollout, []).append(position)
    rollouts = list(samples_of)
    steps = len(rollouts) // global_batch_size
    if steps == 0:
        raise AssertionError(f"{len(rollouts)} rollouts do not fill a step of {global_batch_size}")

    partitions: list[list[int]] = [[] for _ in range(dp_size)]
    micro_batch_indices: list[list[list[int]]] = [[] for _ in range(dp_size)]
    num_microbatches = []
    for step in range(steps):
        chosen = rollouts[step * global_batch_size : (step + 1) * global_batch_size]
        positions = [position for rollout in chosen for position in samples_of[rollout]]
        micro_batches = _pack(args, train_parallel_config, positions, total_lengths)
        num_microbatches.append(len(micro_batches) // dp_size)
        # Dealt out like cards, so that neighbours of one prompt land on different ranks.
        for number, micro_batch in enumerate(micro_batches):
            share = partitions[number % dp_size]
            micro_batch_indices[number % dp_size].append(list(range(len(share), len(share) + len(micro_batch))))
            share.extend(micro_batch)
    return partitions, micro_batch_indices, num_microbatches, [global_batch_size] * steps


def _pack(
    args: Namespace, train_parallel_config: dict[str, Any], positions: list[int], lengths: list[int]
) -> list[list[int]]:
    """Micro-batches of one step; their number is a multiple of the number of ranks."""
    dp_size = train_parallel_config["dp_size"]
    if not args.use_dynamic_batch_size:
        size = args.micro_batch_size
        packed = [positions[start : start + size] for start in range(0, len(positions), size)]
        if len(packed) % dp_size:
            raise AssertionError(f"{len(packed)} micro-batches cannot be dealt out to {dp_size} ranks evenly")
        return packed
    cap = args.max_tokens_per_gpu * train_parallel_config["cp_size"]
    packed = []
    for position in positions:
        room = next((one for one in packed if sum(lengths[i] for i in one) + lengths[position] <= cap), None)
        if room is None:
            packed.append([position])
        else:
            room.append(position)
    while len(packed) % dp_size:
        fullest = max(packed, key=len)
        if len(fullest) == 1:
            raise AssertionError(f"{len(positions)} samples are too few for {dp_size} ranks")
        half = len(fullest) // 2
        packed.append(fullest[half:])
        del fullest[half:]
    return packed
