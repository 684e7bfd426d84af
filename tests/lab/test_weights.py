"""Which part of a weight a rank keeps, by the group that the weight is cut over. Nothing is trained here."""

from __future__ import annotations

import warnings
from argparse import Namespace
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.lab

ATTENTION, EXPERT = "module.decoder.layers.0.linear_qkv.weight", "module.decoder.layers.0.mlp.experts.linear_fc2.weight"


def seeded(monkeypatch: pytest.MonkeyPatch, name: str, shape: tuple[int, int], *, tp: int, etp: int, rank: int) -> Any:
    """One weight as tensor-parallel rank ``rank`` sets it."""
    # Not at the top: collecting this file would import Megatron for all tests. It warns of what is not installed.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from slime_instrument.lab import _weights

    groups = {
        "get_tensor_model_parallel_world_size": tp,
        "get_tensor_model_parallel_rank": rank,
        "get_expert_tensor_parallel_world_size": etp,
        "get_expert_tensor_parallel_rank": rank if etp > 1 else 0,
    }
    for function, value in groups.items():
        monkeypatch.setattr(_weights.mpu, function, lambda value=value: value)
    parameter = torch.zeros(shape)
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    parameter.partition_dim, parameter.partition_stride = 0, 1  # type: ignore[attr-defined]
    module = Namespace(named_params_and_buffers=lambda *_, **__: [(name, parameter)])
    actor = Namespace(model=None, weights_backuper=Namespace(backup=lambda tag: None))
    _weights.set_by_name(module, Namespace(swiglu=False, bf16=False), actor, "actor")
    return parameter


@pytest.mark.parametrize("name", [ATTENTION, EXPERT])
@pytest.mark.parametrize("etp", [1, 2])
def test_the_parts_of_all_ranks_are_the_weight_of_one(monkeypatch: pytest.MonkeyPatch, name: str, etp: int) -> None:
    whole = seeded(monkeypatch, name, (8, 4), tp=1, etp=1, rank=0)
    cut = etp if ".experts." in name else 2
    parts = [seeded(monkeypatch, name, (8 // cut, 4), tp=2, etp=etp, rank=rank) for rank in range(cut)]
    assert torch.cat(parts).equal(whole)
