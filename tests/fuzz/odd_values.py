"""Dumps that load, but hold at some place what nobody expects there; and every offline tool run on them."""

from __future__ import annotations

import copy
import json
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from slime_instrument._analysis.compare import compare
from slime_instrument._analysis.trend import trend
from slime_instrument._convert import convert_files
from slime_instrument._errors import InstrumentError
from slime_instrument._format.pairs import find_pairs
from slime_instrument._format.summary import inspect_dump
from slime_instrument._validate import validate_files

__all__ = ["ODD", "damaged", "dumps", "use"]

# One of each kind: wrong types, wrong shapes, numbers no float or int64 holds, strings that only look like numbers.
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 10**6, 2**31, 2**63, 10**18, 10**30, 10**400, -(10**400)),
    *(1.5, float("nan"), float("inf"), -float("inf"), 1e308, -3.4e38, 1j),
    *("", "x", "²", "--5", "[/red]", "[bold]", "\ud800", "\x1b[31m", b"ab"),
    *([], [None], [1], [1, 2, 3], [0.5], ["a"], [[1], [2]], [10**400], [2**63], [{}], [1j], (), (1, 2), {}, {1: 2}),
    *([1] * 100, [0.5] * 100, [1] * 70 + [0.5], [None] * 70, [1000.0] * 4, [3.0e38] * 5, [-1e30] * 5, {1, 2}),
    *(torch.tensor(3), torch.tensor(3.5), torch.tensor([]), torch.tensor([1, 2, 3]), torch.tensor([1.0, torch.nan])),
    *(torch.zeros(2, 3), torch.zeros(0, 4), torch.tensor([True, False]), torch.tensor(1j), torch.tensor([1j, 2j])),
    *(torch.zeros(3, dtype=torch.bfloat16), torch.zeros(3, dtype=torch.float16), torch.arange(10)[::2]),
    *([torch.tensor([1, 2])], [torch.tensor(1.5)], torch.full((4,), 1000.0), torch.full((5,), -1e29)),
    OrderedDict(a=1),
)


def dumps(chance: random.Random, n: int = 3) -> dict[str, Any]:
    """A v2 dump, an old per-rank dump and the rollout dump of both, with every field that a tool looks at."""
    samples, sources = [], []
    for i in range(n):
        total = chance.randint(4, 9)
        response = chance.randint(0, total - 1)
        tokens, values = list(range(i, i + total)), [-chance.random() for _ in range(response)]
        samples.append(
            {
                "data_parallel_rank": i % 2,
                "rollout_position": i,
                "sample_index": i,
                "tokens": torch.tensor(tokens),
                "total_lengths": total,
                "response_lengths": response,
                "loss_masks": torch.ones(response, dtype=torch.int),
                "log_probs": torch.tensor(values),
                "rollout_log_probs": torch.tensor(values),
                "local_raw_reward": 1.0,
                "rollout_ids": i,
                "rollout_mask_sums": response,
                "max_seq_lens": 16,
                "rollout_top_p_token_ids": torch.arange(response),
                "rollout_top_p_token_offsets": torch.arange(response + 1),
                "rollout_routed_experts": torch.zeros(total - 1, 2, 2, dtype=torch.int32),
                "multimodal_train_inputs": None,
            }
        )
        sources.append(
            {
                "index": i,
                "tokens": tokens,
                "response_length": response,
                "reward": 1.0,
                "status": "completed",
                "rollout_log_probs": values,
                "loss_mask": [1] * response,
                "weight_versions": ["3", "4"],
                "metadata": {"a": [1, 2]},
                "remove_sample": False,
            }
        )
    own = [[i for i in range(n) if i % 2 == rank] for rank in range(2)]
    shards = [
        {
            "rank": rank,
            "data_parallel_rank": rank,
            "sample_indices": own[rank],
            "partition": own[rank],
            "micro_batch_indices": [list(range(len(own[rank])))],
            "num_microbatches": [1],
            "global_batch_sizes": [n],
            "provenance": {"data_parallel": 2, "context_parallel": 1, "fields": {"log_probs": "recomputed"}},
        }
        for rank in range(2)
    ]
    names = ("tokens", "total_lengths", "response_lengths", "loss_masks", "log_probs", "rollout_log_probs")
    columns: dict[str, Any] = {name: [sample[name] for sample in samples] for name in names}
    columns |= {"sample_indices": list(range(n)), "raw_reward": [1.0] * n, "max_seq_lens": [16] * n}
    columns |= {"micro_batch_indices": [list(range(n))], "num_microbatches": [1], "global_batch_sizes": [n]}
    head = {"format_version": 2, "rollout_id": 0, "rank": 0}
    return {
        "0.pt": {**head, "samples": samples, "dp_shards": shards, "raw_reward": [1.0] * n},
        "0_0.pt": {"rollout_id": 0, "rank": 0, "rollout_data": columns},
        "r0.pt": {"rollout_id": 0, "samples": sources},
    }


def damaged(seed: int, folder: Path) -> None:
    """Write the three dumps with an odd value, or none, at one to three places."""
    chance = random.Random(seed)
    payloads = dumps(chance)
    for _ in range(chance.choice([1, 1, 2, 3])):
        payload = chance.choice(list(payloads.values()))
        path = chance.choice([path for path in _paths(payload) if path])
        if len(path) > 4 and chance.random() < 0.7:
            path = path[: chance.randint(2, 4)]
        parent = payload
        for step in path[:-1]:
            parent = parent[step]
        if not isinstance(parent, (dict, list)):
            continue
        if chance.random() < 0.8:
            parent[path[-1]] = copy.deepcopy(chance.choice(ODD))
        else:
            del parent[path[-1]]
    for name, payload in payloads.items():
        torch.save(payload, folder / name)


def use(folder: Path) -> set[str]:
    """Run every tool on the three dumps; which of them gave a result. Raises what must not leave a tool."""
    v2, rank, rollout, made = (folder / name for name in ("0.pt", "0_0.pt", "r0.pt", "c.pt"))
    tools: dict[str, Callable[[], Any]] = {
        "validate": lambda: validate_files([v2, rank, rollout], rollout=rollout).as_dict(),
        "compare": lambda: (found := compare(rollout, v2)).as_dict() | {"trend": trend([found])},
        "field": lambda: compare(rollout, v2, field="rollout_log_probs").as_dict(),
        "unknown field": lambda: compare(rollout, v2, field="nothing").as_dict(),
        "pairs": lambda: find_pairs([rollout, v2, rank]),
        "convert": lambda: convert_files([rank], made).as_dict(),
        "convert by tokens": lambda: convert_files(
            [rank], folder / "c.pt", rollout=rollout, tp=1, pp=1, cp=1
        ).as_dict(),
    }
    for path in (v2, rank, rollout):
        tools[f"inspect {path.name}"] = lambda path=path: [inspect_dump(path, sample=i) for i in (0, 1)]
    done = set()
    for name, tool in tools.items():
        try:
            json.dumps(tool(), allow_nan=False, default=str)
        except InstrumentError as error:
            if "\n" in str(error):
                raise AssertionError(f"{name}: several lines: {str(error)!r}") from error
        else:
            done.add(name)
    return done


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, (dict, list)):
        for step in value if isinstance(value, dict) else range(len(value)):
            yield from _paths(value[step], (*path, step))
