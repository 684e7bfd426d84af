"""Run one function on several forked ranks that are joined over gloo, and collect what each returns."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks import megatron_groups

__all__ = ["run_on_ranks"]

T = TypeVar("T")


def run_on_ranks(
    world: int, cp: int, body: Callable[[int], T], *, gloo_groups: bool = True, timeout_s: float = 600.0
) -> list[T]:
    """``body(rank)`` on each of ``world`` ranks; their results in rank order.

    Everything that ``body`` imports should have been imported here already. A rank that fails or a time-out raises
    RuntimeError, and no process is left.
    """
    port = _free_port()
    context = mp.get_context("fork")
    processes: list[BaseProcess] = []
    readers: dict[Connection, int] = {}
    for rank in range(world):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(rank, world, cp, port, body, writer, gloo_groups), daemon=True)
        process.start()
        writer.close()
        processes.append(process)
        readers[reader] = rank
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while readers:
            ready = wait(list(readers), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(f"ranks {sorted(readers.values())} did not finish in {timeout_s:g} s")
            for answered in ready:
                assert isinstance(answered, Connection)
                rank = readers.pop(answered)
                try:
                    kind, value = answered.recv()
                except EOFError:
                    kind, value = "failed", "it ended without a word"
                if kind == "failed":
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results[rank] = value
    finally:
        for started in processes:
            started.join(0 if len(results) < world else 10)
            if started.is_alive():
                started.kill()
                started.join()
    return [results[rank] for rank in range(world)]


def _main(
    rank: int, world: int, cp: int, port: int, body: Callable[[int], Any], answer: Connection, gloo_groups: bool
) -> None:
    try:
        torch.set_num_threads(1)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=120))
        megatron_groups.initialise(cp, gloo_groups=gloo_groups)
        answer.send(("result", body(rank)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer.send(("failed", traceback.format_exc()))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
