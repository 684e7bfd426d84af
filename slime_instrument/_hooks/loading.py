"""Data loader: ``partition``, each local sample's position in the rollout, survives loading.

slime ships ``partition`` to every rank and drops it while loading (v0.2.1 until #2266, which keeps it). The dict that
holds it exists only inside ``process_rollout_data``, where it comes out of ``ray.get``; so while a load runs, the
module's ``ray`` is replaced by a stand-in that looks at what passes through. Fetching the data a second time would
double the loading time.

v0.2.0 has no ``partition`` at all: it ships one box to all ranks and cuts it locally. There the same cut is worked out:
either every ``dp_size``-th sample, or groups of samples balanced by length with slime's own function. The result is
proven against the lengths that the rank ended up with; where it cannot be proven, nothing is claimed, and the dump
orders its samples by sample index instead.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import wrapt

from slime_instrument._dump.agree import megatron_is_up
from slime_instrument._hooks.capture import (
    NATIVE_CAPTURE,
    POSITION_KEY,
    Loaded,
    Process,
    Scope,
    arguments,
    dict_with,
    dump_is_asked_for,
)
from slime_instrument._patching.patch import Already, Call, around
from slime_instrument._switch import package

_MODULE = f"{package()}.utils.data"


@around(
    "data-loader",
    f"{_MODULE}:process_rollout_data",
    group="positions",
    needs=("dump", "rollout-metrics"),  # the latter hides what is added here from slime's metrics
    unless=Already(NATIVE_CAPTURE, "slime itself keeps the positions since #2266"),
    on_failure="The positions of this rollout's samples are lost, and with them its train dump.",
)
def keep_positions(call: Call) -> Iterator[None]:
    process: Process = call.process
    process.take_failures()  # a new rollout begins; what failed before concerned another one
    # On another backend (FSDP) an unknown key in rollout_data is not ours to add.
    if not dump_is_asked_for(arguments(call)) or not megatron_is_up():
        return
    arrived: list[Any] = []
    with LOADS.opened(arrived), _watched_ray(process):
        yield
    process.loaded = Loaded()
    rollout_data = dict_with("total_lengths", call.result)
    if rollout_data is not None:
        process.loaded = _with_positions(call, rollout_data, arrived)


def _with_positions(call: Call, rollout_data: dict[str, Any], arrived: list[Any]) -> Loaded:
    """Put the positions into ``rollout_data`` unless slime left them there."""
    if POSITION_KEY in rollout_data:
        return Loaded("partition")
    positions = arrived[-1] if arrived else _reconstructed(call, rollout_data)
    if positions is None or len(positions) != len(rollout_data["total_lengths"]):
        return Loaded()
    rollout_data[POSITION_KEY] = [int(position) for position in positions]
    return Loaded("partition" if arrived else "reconstructed", added=True)


# ---------------------------------------------------------------- what comes out of ray.get while a load runs

LOADS: Scope[list[Any]] = Scope("load")
_swapping = threading.Lock()


class WatchedRay(wrapt.ObjectProxy[Any]):
    """``ray`` as slime's data module sees it; everything passes through."""

    _self_loads = 0

    def get(self, *args: Any, **kwargs: Any) -> Any:
        value = self.__wrapped__.get(*args, **kwargs)
        load = LOADS.current()
        if load is not None and isinstance(value, dict) and POSITION_KEY in value:
            load.append(value[POSITION_KEY])  # looked at later, where an oddity cannot reach slime
        return value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return importlib.import_module, (self.__wrapped__.__name__,)


def _loader(process: Process) -> Any:
    """slime's own function; the module that defines it need not be the one that it was taken from."""
    return inspect.unwrap(process.patcher["data-loader"].original)


@contextmanager
def _watched_ray(process: Process) -> Iterator[None]:
    """The stand-in is in place while any thread loads, and what it stands for is back after the last one."""
    namespace = _loader(process).__globals__
    if "ray" not in namespace:  # positions then count as unknown, unless they can be worked out
        yield
        return
    with _swapping:
        ray: Any = namespace["ray"]
        if type(ray) is not WatchedRay:
            ray = namespace["ray"] = WatchedRay(ray)
        original = ray.__wrapped__
        ray._self_loads += 1
    try:
        yield
    finally:
        with _swapping:
            ray._self_loads -= 1
            if ray._self_loads == 0 and namespace.get("ray") is ray:
                namespace["ray"] = original


# ---------------------------------------------------------------- v0.2.0


def _reconstructed(call: Call, rollout_data: dict[str, Any]) -> list[int] | None:
    """Only where slime has no positions at all. Those that it has, and that were not seen, are another cut: equal
    lengths would prove nothing."""
    dp_rank, dp_size = call.get("dp_rank"), call.get("dp_size")
    if dp_rank is None or dp_size is None or POSITION_KEY in _loader(call.process).__code__.co_consts:
        return None
    return reconstruct(arguments(call), rollout_data, dp_rank, dp_size)


def reconstruct(args: Any, rollout_data: dict[str, Any], dp_rank: int, dp_size: int) -> list[int] | None:
    """The rollout position of each local sample, or None where the cut is not known."""
    lengths = _whole_batch_lengths()
    if lengths is None:
        return None
    if getattr(args, "balance_data", False):
        positions = _balanced(lengths, getattr(args, "n_samples_per_prompt", 1), dp_rank, dp_size)
    else:
        positions = list(range(dp_rank, len(lengths), dp_size))
    if positions is None or [lengths[p] for p in positions] != list(rollout_data["total_lengths"]):
        return None
    return positions


def _whole_batch_lengths() -> list[int] | None:
    """slime's timer keeps the lengths of the whole batch, for its throughput figures."""
    timer = getattr(sys.modules.get(f"{package()}.utils.timer"), "Timer", None)
    lengths = getattr(timer(), "seq_lens", None) if timer is not None else None
    return None if lengths is None else [int(length) for length in lengths]


def _balanced(lengths: list[int], per_prompt: int, dp_rank: int, dp_size: int) -> list[int] | None:
    balance = getattr(sys.modules.get(_MODULE), "get_seqlen_balanced_partitions", None)
    if balance is None:
        return None
    # Samples beyond the last whole group are on no rank.
    starts = range(0, len(lengths) - per_prompt + 1, per_prompt)
    groups = [sum(lengths[start : start + per_prompt]) for start in starts]
    mine = balance(groups, dp_size, equal_size=True)[dp_rank]
    return [group * per_prompt + offset for group in mine for offset in range(per_prompt)]
