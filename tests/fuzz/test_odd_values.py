"""Whatever stands in a dump that loads, a tool gives strict JSON or one line."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fuzz.odd_values import ODD, damaged, dumps, use

FIELDS = [
    ("0.pt", "format_version"),
    ("0.pt", "raw_reward"),
    ("0.pt", "samples", 0, "response_lengths"),
    ("0.pt", "samples", 0, "tokens"),
    ("0.pt", "samples", 0, "loss_masks"),
    ("0.pt", "samples", 0, "log_probs"),
    ("0.pt", "samples", 0, "rollout_position"),
    ("0.pt", "samples", 0, "data_parallel_rank"),
    ("0.pt", "samples", 0, "local_raw_reward"),
    ("0.pt", "dp_shards", 0, "global_batch_sizes"),
    ("0.pt", "dp_shards", 0, "provenance", "context_parallel"),
    ("0_0.pt", "rank"),
    ("0_0.pt", "rollout_data", "tokens"),
    ("0_0.pt", "rollout_data", "response_lengths"),
    ("0_0.pt", "rollout_data", "sample_indices"),
    ("0_0.pt", "rollout_data", "max_seq_lens"),
    ("0_0.pt", "rollout_data", "log_probs", 1),
    ("r0.pt", "samples", 0, "weight_versions"),
    ("r0.pt", "samples", 0, "remove_sample"),
    ("r0.pt", "samples", 0, "rollout_log_probs"),
    ("r0.pt", "samples", 0, "response_length"),
]


def test_every_tool_works_on_what_is_not_damaged(tmp_path: Path) -> None:
    for name, payload in dumps(random.Random(0)).items():
        torch.save(payload, tmp_path / name)
    assert use(tmp_path) == {
        *("validate", "compare", "field", "pairs", "convert", "convert by tokens"),
        *("inspect 0.pt", "inspect 0_0.pt", "inspect r0.pt"),
    }


@pytest.mark.parametrize("place", FIELDS, ids=lambda place: ".".join(map(str, place)))
def test_an_odd_value_in_a_field_ends_no_tool_with_a_traceback(place: tuple[Any, ...], tmp_path: Path) -> None:
    name, *steps = place
    for odd in random.Random(repr(place)).sample(ODD, 15):
        payloads = dumps(random.Random(0))
        parent = payloads[name]
        for step in steps[:-1]:
            parent = parent[step]
        parent[steps[-1]] = copy.deepcopy(odd)
        for file, payload in payloads.items():
            torch.save(payload, tmp_path / file)
        use(tmp_path)


def test_odd_values_anywhere_end_no_tool_with_a_traceback(tmp_path: Path) -> None:
    done: set[str] = set()
    for seed in range(120):
        damaged(seed, tmp_path)
        done |= use(tmp_path)
    assert done >= {"validate", "compare", "convert"}
