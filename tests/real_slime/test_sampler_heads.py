"""The sampler's top k ride along with the rollout: of real slime's dumps they come out whole on every layout.

These releases do not have them. Here they are put into ``rollout_data`` right before the optimizer steps, as later
releases have them: on the CPU, cut by slime's own function, whole with ``--allgather-cp``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._format.schema import SAMPLER_HEAD_FIELDS
from slime_instrument._validate import validate_files
from slime_instrument.lab import LabOptions, LabResult, find_sources, train_all
from tools.matrix.layouts import LAYOUTS as MATRIX_LAYOUTS
from tools.matrix.plan import LAST_WITHOUT

pytestmark = pytest.mark.real_slime

HOOK = """
import torch
from slime_instrument._format.schema import SAMPLER_HEAD_FIELDS

def add_heads(rank, actor_module, args):
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    train = actor_module.train

    def train_with_heads(rollout_id, model, optimizer, scheduler, data_iterator, *rest):
        data = data_iterator[0].rollout_data
        ids, log_probs = data[SAMPLER_HEAD_FIELDS[0]], data[SAMPLER_HEAD_FIELDS[1]] = [], []
        for tokens, total, response in zip(data["tokens"], data["total_lengths"], data["response_lengths"]):
            whole = torch.stack([tokens[total - response :].cpu() * 7 + k for k in range(5)], 1)
            for into, value in ((ids, whole.to(torch.int32)), (log_probs, -whole.to(torch.float32) / 3)):
                into.append(value if args.allgather_cp else slice_log_prob_with_cp(value, total, response))
        return train(rollout_id, model, optimizer, scheduler, data_iterator, *rest)

    actor_module.train = train_with_heads
"""
LAYOUTS: dict[str, dict[str, Any]] = {
    "single": {},
    "DP2-CP2": {"dp": 2, "cp": 2},
    "TP2-PP2-CP2": {"tp": 2, "pp": 2, "cp": 2},
    "allgather-CP2": {"cp": 2, "overrides": MATRIX_LAYOUTS["allgather-CP2"].overrides},
}


@pytest.mark.parametrize("release", [LAST_WITHOUT, pytest.param("main", marks=pytest.mark.full)])
def test_they_are_whole_on_every_layout(release: str, tmp_path: Path) -> None:
    source = next((each for each in find_sources() if each.name == release), None)
    if source is None:
        pytest.skip(f"no slime checkout named {release}")
    (tmp_path / "hook.py").write_text(HOOK)
    hook = f"{tmp_path / 'hook.py'}:add_heads"
    runs = [LabOptions(out=tmp_path / name, slime=source, rank_hook=hook, **LAYOUTS[name]) for name in LAYOUTS]
    for name, result in zip(LAYOUTS, train_all(runs), strict=True):
        assert isinstance(result, LabResult)
        (path,) = result.train_dumps
        dump = torch.load(path, weights_only=True)
        assert len(dump["samples"]) == 8
        for sample in dump["samples"]:
            response = sample["tokens"][sample["total_lengths"] - sample["response_lengths"] :]
            expected = torch.stack([response * 7 + k for k in range(5)], 1)
            ids, log_probs = (sample[field] for field in SAMPLER_HEAD_FIELDS)
            assert (ids.dtype, log_probs.dtype) == (torch.int32, torch.float32), name
            assert torch.equal(ids, expected.to(torch.int32)), name
            assert torch.equal(log_probs, -expected.to(torch.float32) / 3), name
        assert validate_files([path], rollout=result.rollout_dumps[0]).errors == []
