"""What single slime releases need to train on a CPU beside a newer torch and Megatron-Core."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from typing import Any

import torch
from torch.distributed import ProcessGroup

from slime_instrument.lab._cpu import CPU


def before_import() -> None:
    """Later main asks an accelerator object of its own: register a CPU there, through slime's API for that."""
    try:
        from slime.utils import accelerator
        from slime.utils.accelerator.cuda import CUDAAccelerator
    except ImportError:
        return

    class CPUAccelerator(CUDAAccelerator):  # type: ignore[misc]
        def is_available(self) -> bool:
            return True

        def device(self, index: int | None = None) -> torch.device:
            return CPU

        def current_device(self) -> torch.device:
            return CPU

        def device_count(self) -> int:
            return 1

        def communication_backend(self, default: str = "nccl") -> str:
            return "gloo"

        def distributed_device_id(self, index: int | None = None) -> None:
            return None

        def supports(self, capability: Any) -> bool:
            return False

    accelerator.set_accelerator(CPUAccelerator())


def batches_count_rollouts() -> bool:
    """Whether ``global_batch_size`` counts rollouts, however many samples each has (since v0.3.0), or samples."""
    return importlib.util.find_spec("slime.utils.dp_schedule") is not None


def ships_one_box() -> bool:
    """Whether all ranks get one box and cut their part out of it (v0.2.0)."""
    from slime.ray.rollout import RolloutManager

    metadata = getattr(RolloutManager, "__ray_metadata__", None)
    return not hasattr(metadata.modified_class if metadata else RolloutManager, "_split_train_data_by_dp")


def after_import() -> None:
    _accept_old_optimizer_signature()
    _forward_new_process_group_methods()


def _accept_old_optimizer_signature() -> None:
    """v0.2.0 and v0.2.1 pass the positional arguments of core 0.14, and prefill Adam's state as for fused Adam."""
    model = sys.modules["slime.backends.megatron_utils.model"]
    if "no_wd_decay_cond" not in inspect.signature(model.setup_model_and_optimizer).parameters:
        return
    real = model.get_megatron_optimizer

    def adapted(config: Any, model_chunks: Any, *_old: Any, **kwargs: Any) -> Any:
        optimizer = real(config, model_chunks, **kwargs)
        for part in getattr(optimizer, "chained_optimizers", [optimizer]):
            part.init_state_fn = None
        return optimizer

    model.__dict__["get_megatron_optimizer"] = adapted


def _forward_new_process_group_methods() -> None:
    """torch 2.13 calls ``ProcessGroup.*_single``, which slime's reloadable wrapper does not pass on."""
    module = sys.modules.get("slime.utils.reloadable_process_group")
    if module is None:
        return
    wrapper: Any = module.ReloadableProcessGroup

    def forward(name: str) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if hasattr(self, "_fwd"):
                return self._fwd(name, *args, **kwargs)
            return getattr(self.group, name)(*args, **kwargs)

        return call

    for name in dir(ProcessGroup):
        if name.endswith("_single") and name not in wrapper.__dict__:
            setattr(wrapper, name, forward(name))
