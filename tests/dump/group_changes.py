"""Run by test_process_groups: dumps on forked gloo ranks whose process groups change, or are not all there."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from benchmarks import megatron_groups
from benchmarks.ranks import run_on_ranks
from benchmarks.shards import Case, rollout_data
from slime_instrument._dump.contribute import Seen
from slime_instrument._dump.dumper import Dumper
from slime_instrument._patching.failures import FailurePolicy
from slime_instrument._settings import Settings

CASE = Case(cp=2, dp=2, samples=5, response=20, fields=4)


def dumper() -> Dumper:
    return Dumper(Settings.from_environment(), FailurePolicy(lambda: True).report)


def dump_once(dumper: Dumper, rank: int, folder: Path, rollout_id: int) -> None:
    data = rollout_data(CASE, rank)
    args = SimpleNamespace(save_debug_train_data=str(folder / "{rollout_id}.pt"), qkv_format="thd")
    dumper.begin(rollout_id)
    dist.barrier()  # in the place of a training step, in which all ranks take part
    dumper.dump(args, rollout_id, data, Seen(came_with_rollout=frozenset(data)))


def plain(folder: Path, rank: int) -> None:
    dump_once(dumper(), rank, folder, 0)


def rebuilt_subgroups(folder: Path, rank: int) -> None:
    ours = dumper()
    dump_once(ours, rank, folder, 0)
    state: Any = sys.modules["megatron.core.parallel_state"]
    dist.barrier()
    for group in (state._cp_group, state._dp_group, state._all):
        dist.destroy_process_group(group)
    megatron_groups.initialise(CASE.cp)
    dump_once(ours, rank, folder, 1)


def rebuilt_world(folder: Path, rank: int) -> None:
    """Everything is destroyed, the default group too, and comes back over the old store under a new prefix."""
    from torch.distributed import distributed_c10d

    ours = dumper()
    store = distributed_c10d._get_default_store()
    dump_once(ours, rank, folder, 0)
    for generation in (1, 2):
        dist.barrier()
        dist.destroy_process_group()
        again = dist.PrefixStore(f"generation-{generation}", store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=CASE.world)
        megatron_groups.initialise(CASE.cp)
        dump_once(ours, rank, folder, generation)


def main(scenario: str, folder: str) -> None:
    megatron_groups.load(stand_in=True)
    body = {"plain": plain, "no-gloo": plain, "subgroups": rebuilt_subgroups, "world": rebuilt_world}[scenario]
    run_on_ranks(CASE.world, CASE.cp, partial(body, Path(folder)), gloo_groups=scenario != "no-gloo", timeout_s=60)


if __name__ == "__main__":
    main(*sys.argv[1:])
