"""Data loader: ``partition``, each local sample's position in the rollout, survives loading.

slime ships ``partition`` to every rank and drops it while loading (v0.2.1 until #2266, which keeps it). The dict that
holds it exists only inside ``process_rollout_data``, where it comes out of ``ray.get``; so the module's ``ray`` is
replaced by a stand-in that, during such a call, looks at what passes through. Fetching the data a second time would
double the loading time. v0.2.0 has no ``partition`` at all: see ``positions_v020``.
"""

from __future__ import annotations

import importlib
from contextvars import ContextVar
from typing import Any

import wrapt

from slime_instrument import _runtime as runtime
from slime_instrument._capture import POSITION_KEY
from slime_instrument._dump.contribute import megatron_is_up
from slime_instrument._hooks.positions_v020 import reconstruct
from slime_instrument._patching.declaration import Advice, Call, Patch, Target

_LOADING: ContextVar[list[Any] | None] = ContextVar("slime_instrument_loading", default=None)


class WatchedRay(wrapt.ObjectProxy[Any]):
    """``ray`` as slime's data module sees it; everything passes through."""

    def get(self, *args: Any, **kwargs: Any) -> Any:
        value = self.__wrapped__.get(*args, **kwargs)
        loading = _LOADING.get()
        if loading is not None and isinstance(value, dict) and POSITION_KEY in value:
            loading.append(value[POSITION_KEY])  # looked at later, where an oddity cannot reach slime
        return value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return importlib.import_module, (self.__wrapped__.__name__,)


def keep_positions(call: Call) -> Advice | None:
    args = call["args"]
    runtime.current().take_failure()  # a new rollout begins; what failed before concerned another one
    # On another backend (FSDP) an unknown key in rollout_data is not ours to add.
    if getattr(args, "save_debug_train_data", None) is None or not megatron_is_up():
        return None
    seen: list[Any] = []
    token = _LOADING.set(seen)

    def put_back(rollout_data: Any) -> Any:
        if isinstance(rollout_data, dict) and POSITION_KEY not in rollout_data:
            positions = reconstruct(args, rollout_data, call["dp_rank"], call["dp_size"]) if not seen else seen[-1]
            if positions is not None and len(positions) == len(rollout_data["total_lengths"]):
                rollout_data[POSITION_KEY] = [int(position) for position in positions]
                runtime.current().positions_from = "partition" if seen else "reconstructed"
            else:
                runtime.current().positions_from = "unknown"
        elif isinstance(rollout_data, dict):
            runtime.current().positions_from = "partition"
        return rollout_data

    return Advice(after=put_back, cleanup=lambda: _LOADING.reset(token))


PATCHES = (
    Patch(
        name="data-loader",
        group="positions",
        needs=("metrics",),
        targets=(Target("slime.utils.data", "process_rollout_data"),),
        relies_on=("args", "rollout_data_ref", "dp_rank", "dp_size"),
        before=keep_positions,
        lost="The positions of this rollout's samples are lost, and with them its train dump.",
    ),
    Patch(
        name="data-fetch",
        group="positions",
        needs=("metrics",),
        targets=(Target("slime.utils.data", "ray"),),
        replace=WatchedRay,
    ),
)
