"""One armed rank that trains a made slime, in this process."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slime_instrument import _runtime as runtime
from slime_instrument import _switch as switch

from .fake_slime import PLAIN, FakeSlime, Form


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch, process_group: None) -> SimpleNamespace:
    """``parallel_state`` of a single rank; set ``up`` to False for a process without Megatron groups."""
    state = SimpleNamespace(up=True)
    module: Any = ModuleType("megatron.core.parallel_state")
    module.model_parallel_is_initialized = lambda: state.up
    module.get_data_parallel_group = lambda with_context_parallel: dist.group.WORLD
    module.is_pipeline_last_stage = lambda ignore_virtual: True
    module.get_data_parallel_world_size = lambda with_context_parallel: 1
    module.get_data_parallel_rank = lambda with_context_parallel: 0
    for kind in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel"):
        setattr(module, f"get_{kind}_world_size", lambda: 1)
        setattr(module, f"get_{kind}_rank", lambda: 0)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", module)
    return state


@pytest.fixture
def slime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, megatron: SimpleNamespace
) -> Iterator[Callable[..., FakeSlime]]:
    """Makes the package importable in the wanted form, with a ``ray`` whose references are the data itself."""
    monkeypatch.setattr(runtime, "_current", None)
    ray: Any = ModuleType("ray")
    ray.get = copy.deepcopy
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in FakeSlime.modules():
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "fake"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def make(form: Form = PLAIN, **replaced: str) -> FakeSlime:
        fake = FakeSlime(folder)
        fake.write(form, **replaced)
        return fake

    yield make
    runtime.uninstrument()
    switch.cancel()
    for name in FakeSlime.modules():
        sys.modules.pop(name)
    importlib.invalidate_caches()


@pytest.fixture
def args(tmp_path: Path) -> SimpleNamespace:
    return SimpleNamespace(
        save_debug_train_data=str(tmp_path / "out" / "{rollout_id}.pt"),
        save_debug_rollout_data=None,
        dump_details=None,
        num_rollout=10,
        start_rollout_id=0,
        dp_size=1,
        steps=1,
        recompute=False,
        indexed=False,
        compute_log_probs=False,
        fail_in_loss=None,
        fail_at_end=False,
        balance_data=False,
        n_samples_per_prompt=1,
    )


@pytest.fixture
def trainer(slime: Callable[..., FakeSlime], args: SimpleNamespace) -> Callable[..., Any]:
    """An initialised actor of the made slime."""

    def make(role: str = "actor") -> Any:
        actor = importlib.import_module("slime.backends.megatron_utils.actor").MegatronTrainRayActor()
        actor.init(args, role)
        return actor

    return make


def _batch(partition: list[int] | None = None) -> dict[str, Any]:
    order = [2, 0, 1] if partition is None else partition
    lengths = {0: 3, 1: 4, 2: 5}
    tokens = {i: torch.arange(1.0, lengths[i] + 1) + 10 * i for i in lengths}
    return {
        "partition": order,
        "total_lengths": [lengths[i] for i in range(len(lengths))],
        "response_lengths": list(order),
        "unconcat_tokens": [tokens[i] for i in order],
        "tokens": [tokens[i] for i in order],
        "loss_masks": [torch.ones(i, dtype=torch.int) for i in order],
        "raw_reward": [0.0, 1.0, 2.0],
    }


@pytest.fixture
def batch() -> dict[str, Any]:
    """Three samples, number i with response length i, local order 2, 0, 1."""
    return _batch()


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """The dump of a rollout, read the safe way."""

    def read(rollout_id: int = 0, name: str | None = None) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(tmp_path / "out" / (name or f"{rollout_id}.pt"), weights_only=True)
        return found

    return read
