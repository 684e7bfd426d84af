"""The places in slime that are wrapped, as functions that do next to nothing: what remains is the cost of wrapping."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

__all__ = ["install"]

_SOURCES = {
    "slime": "",
    "slime.backends": "",
    "slime.backends.megatron_utils": "",
    "slime.ray": "",
    "slime.utils": "",
    "slime.utils.data": """
import types
ray = types.SimpleNamespace(get=lambda reference: reference)
def process_rollout_data(args, rollout_data_ref, dp_rank, dp_size):
    return ray.get(rollout_data_ref)
""",
    "slime.utils.train_dump_utils": """
def save_debug_train_data(args, *, rollout_id, rollout_data):
    return None
""",
    "slime.backends.megatron_utils.data": """
class DataIterator:
    def get_next(self, keys):
        return None
def log_rollout_data(rollout_id, args, rollout_data):
    return None
""",
    "slime.backends.megatron_utils.model": """
def train_one_step(args, rollout_id, step_id):
    return None
""",
    "slime.backends.megatron_utils.loss": """
result = None
def get_log_probs_and_entropy(logits, *, args, unconcat_tokens, total_lengths, response_lengths):
    return result
def policy_loss_function(args, batch, logits, sum_of_sample_mean):
    if result is None:
        return None
    return get_log_probs_and_entropy(
        logits, args=args, unconcat_tokens=None, total_lengths=None, response_lengths=None
    )
""",
    "slime.backends.megatron_utils.actor": """
class MegatronTrainRayActor:
    args = None
    def init(self, args, role, with_ref=False):
        return None
    def train_actor(self, rollout_id, rollout_data):
        return None
""",
}


def install() -> dict[str, Any]:
    """Put the modules into ``sys.modules``; returns them by name. RuntimeError when a slime is loaded already."""
    if "slime" in sys.modules:
        raise RuntimeError("slime is imported already")
    made: dict[str, Any] = {}
    for name, source in _SOURCES.items():
        module = ModuleType(name)
        if not source:
            module.__path__ = []
        exec(compile(source, name, "exec"), module.__dict__)  # so that functions say where they live
        made[name] = sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(made[parent], child, module)
    return made
