"""The CPU in the place of CUDA: the smallest set of ``torch.cuda`` redirections that slime and Megatron-Core need.

``install`` runs before either is imported, and changes torch for the whole process: only the lab's worker calls it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_active: list[TorchFunctionMode] = []


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class CudaToCpu(TorchFunctionMode):
    """Tensors that are asked onto CUDA stay on the CPU, and still say that their type is a CUDA one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's optimizer sorts parameters by these strings and knows the CUDA ones only.
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **kwargs)


class Stream:
    """Stands for streams and events: on one CPU thread everything already happened in order."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def record_event(self, *_args: Any) -> Stream:
        return Stream()

    def query(self) -> bool:
        return True

    def _nothing(self, *_args: Any) -> None:
        pass

    wait_stream = wait_event = synchronize = record = _nothing


def install() -> None:
    """Redirect ``torch.cuda``; a second call does nothing."""
    if _active:
        return
    cuda: Any = torch.cuda

    def put(name: str, answer: Callable[..., Any]) -> None:
        # A function object of its own for each name: torch._dynamo refuses to know one object by two names.
        setattr(cuda, name, lambda *args, **kwargs: answer(*args, **kwargs))

    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        put(name, lambda *_args, **_kwargs: None)
    for name in ("current_stream", "default_stream"):
        put(name, lambda *_args, **_kwargs: Stream())
    for name in ("memory_allocated", "memory_reserved"):
        put(name, lambda *_args: 0)
    put("mem_get_info", lambda *_args: (1 << 30, 1 << 30))
    put("current_device", lambda: CPU)
    put("get_rng_state", lambda *_args, **_kwargs: torch.get_rng_state())
    put("set_rng_state", lambda state, *_args, **_kwargs: torch.set_rng_state(state))
    put("manual_seed", lambda seed: torch.manual_seed(seed))
    put("stream", lambda _stream: contextlib.nullcontext())
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.Stream = cuda.Event = Stream
    mode = CudaToCpu()
    mode.__enter__()  # type: ignore[no-untyped-call]
    _active.append(mode)


def after_megatron_import() -> None:
    """What Megatron-Core itself keeps from working without CUDA and TransformerEngine."""
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils

    # Named in an annotation of core 0.16.1 that only exists with TransformerEngine.
    moe_utils.__dict__.setdefault("te_general_gemm", None)
    random._set_cuda_rng_state = lambda state, *_args, **_kwargs: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda *_args, **_kwargs: torch.get_rng_state()
