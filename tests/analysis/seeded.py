"""Pairs of dumps that are right, and the same with one known fault.

Log-probs come from a softmax over random logits, so that temperature and truncation act as they do in an engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime_instrument._dump.zigzag import owned
from slime_instrument._format.dumps import RolloutDump, TrainDump, rollout_dump_of, train_dump_of

VOCABULARY = 64
ROLLOUT_ID = 7


@dataclass(frozen=True)
class Size:
    """How large a pair of dumps is, and how much of it a fault touches."""

    name: str
    samples: int
    response: int


SIZES = (Size("small", 6, 24), Size("medium", 16, 80), Size("large", 40, 300))
SEEDS = (0, 1, 2)


@dataclass
class Case:
    """The two payloads and what they were made from."""

    rollout: dict[str, Any]
    train: dict[str, Any]
    random: torch.Generator
    size: Size
    logits: list[torch.Tensor]

    def uniform(self) -> float:
        return float(torch.rand(1, generator=self.random))

    def some(self, share: float) -> list[int]:
        """A random choice of samples, at least one."""
        n = max(1, round(share * self.size.samples))
        return sorted(torch.randperm(self.size.samples, generator=self.random)[:n].tolist())

    def records(self) -> tuple[RolloutDump, TrainDump]:
        return (
            rollout_dump_of(Path(f"rollout_data/{ROLLOUT_ID}.pt"), self.rollout),
            train_dump_of(Path(f"train_data/{ROLLOUT_ID}.pt"), self.train),
        )


def log_softmax_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def exact(size: Size, seed: int, *, turns: bool = True) -> Case:
    """Train and rollout agree to the last bit."""
    random = torch.Generator().manual_seed(1000 * seed + size.samples)
    rollout, train, all_logits = [], [], []
    half = (size.samples + 1) // 2
    for position in range(size.samples):
        prompt = int(torch.randint(3, 12, (1,), generator=random))
        response = int(torch.randint(max(2, size.response // 2), 3 * size.response // 2, (1,), generator=random))
        scale = torch.rand(response, 1, generator=random) * 5 + 0.5
        logits = torch.randn(response, VOCABULARY, generator=random) * scale
        picked = torch.multinomial(logits.softmax(-1), 1, generator=random)[:, 0]
        log_probs = log_softmax_of(logits, picked)
        mask = torch.ones(response, dtype=torch.int32)
        if turns and position % 2 and response >= 12:
            mask[response // 3 : response // 3 + 4] = 0  # a tool's answer
        sampled = torch.where(mask == 1, log_probs, 0.0)
        tokens = torch.cat([torch.randint(0, VOCABULARY, (prompt,), generator=random), picked])
        all_logits.append(logits)
        rollout.append(
            {
                "index": 100 + position,
                "tokens": tokens.tolist(),
                "response_length": response,
                "rollout_log_probs": sampled.tolist(),
                "loss_mask": mask.tolist(),
                "remove_sample": False,
                "weight_versions": ["7"],
                "status": "completed",
                "reward": 1.0,
            }
        )
        train.append(
            {
                "data_parallel_rank": position // half,
                "sample_index": 100 + position,
                "rollout_position": position,
                "tokens": tokens,
                "response_lengths": response,
                "total_lengths": prompt + response,
                "loss_masks": mask.clone(),
                "rollout_ids": 100 + position,
                "log_probs": log_probs.clone(),
            }
        )
    shards = []
    for rank in range(2):
        own = [one for one in train if one["data_parallel_rank"] == rank]
        shards.append(
            {
                "rank": rank,
                "data_parallel_rank": rank,
                "sample_indices": [one["sample_index"] for one in own],
                "partition": [one["rollout_position"] for one in own],
                "global_batch_sizes": [size.samples],
            }
        )
    payload = {
        "format_version": 2,
        "rollout_id": ROLLOUT_ID,
        "rank": 0,
        "samples": train,
        "dp_shards": shards,
        "raw_reward": [1.0] * size.samples,
    }
    return Case({"rollout_id": ROLLOUT_ID, "samples": rollout}, payload, random, size, all_logits)


def kernel_noise(case: Case, scale: float = 0.004, growth: float = 0.006) -> Case:
    """Add what two kernels differ by: normal with heavy tails, and larger where probabilities are small."""
    for sample in case.train["samples"]:
        values = sample["log_probs"]
        heavy = torch.randn(values.shape, generator=case.random)
        spread = torch.rand(values.shape, generator=case.random).clamp(min=0.05).rsqrt()
        sample["log_probs"] = (values + heavy * spread * (scale + growth * values.abs())).clamp(max=0.0)
    return case


def clean(size: Size, seed: int) -> Case:
    """The clean pair into which faults are put."""
    return kernel_noise(exact(size, seed))


def _bf16(case: Case, side: str) -> Case:
    for sample in case.train["samples"]:
        if side in ("train", "both"):
            sample["log_probs"] = sample["log_probs"].bfloat16()
    for source in case.rollout["samples"]:
        if side in ("rollout", "both"):
            source["rollout_log_probs"] = torch.tensor(source["rollout_log_probs"]).bfloat16().float().tolist()
    return case


def _lazy_lists(case: Case) -> Case:
    for source in case.rollout["samples"]:
        source.update(loss_mask=None, rollout_log_probs=torch.tensor(source["rollout_log_probs"]))
        source.pop("weight_versions")
    for sample in case.train["samples"]:
        sample["loss_masks"] = torch.ones_like(sample["loss_masks"])
    return case


def _mixed_staleness(case: Case) -> Case:
    for source in case.rollout["samples"]:
        source["weight_versions"] = [str(7 - int(4 * case.uniform()))]
    return case


CLEAN: dict[str, Callable[[Size, int], Case]] = {
    "exact": exact,
    "kernel noise": clean,
    "strong kernel noise": lambda size, seed: kernel_noise(exact(size, seed), 0.02, 0.02),
    "noise, stored as bf16": lambda size, seed: _bf16(clean(size, seed), "train"),
    "strong noise, stored as bf16": lambda size, seed: _bf16(kernel_noise(exact(size, seed), 0.02, 0.02), "train"),
    "no masks": lambda size, seed: _lazy_lists(kernel_noise(exact(size, seed, turns=False))),
    "staleness without growth": lambda size, seed: _mixed_staleness(clean(size, seed)),
}


ROUNDED: dict[str, Callable[[Size, int], Case]] = {
    "noise and bf16 rollout": lambda size, seed: _bf16(clean(size, seed), "rollout"),
    "noise and bf16 on both": lambda size, seed: _bf16(clean(size, seed), "both"),
    "strong noise and bf16 on both": lambda size, seed: _bf16(kernel_noise(exact(size, seed), 0.02, 0.02), "both"),
}
"""Rounded before they were stored in a longer type: the bits show it, whatever noise lies on top."""


def token_shift(case: Case) -> None:
    for i in case.some(0.5):
        sample = case.train["samples"][i]
        sample["log_probs"] = sample["log_probs"].roll(1 if case.uniform() < 0.5 else -1)


def cp_boundary(case: Case) -> None:
    for sample in case.train["samples"]:
        response, total = sample["response_lengths"], sample["total_lengths"]
        values = sample["log_probs"].clone()
        for rank in range(2):
            for piece in owned(total, response, 2, rank):
                if len(piece) and piece.stop < response:
                    values[piece.stop - 1] -= 1 + 3 * case.uniform()
        sample["log_probs"] = values


def temperature(case: Case) -> None:
    ratio = 1.15 + 0.2 * case.uniform()
    for sample in case.train["samples"]:
        sample["log_probs"] = sample["log_probs"] * ratio


def truncated_sampling(case: Case) -> None:
    for source in case.rollout["samples"]:
        mass = 0.75 + 0.15 * case.uniform()
        values = torch.tensor(source["rollout_log_probs"])
        mask = torch.tensor(source["loss_mask"])
        # A token that survives has at most the mass that survives: its probability after sampling is at most 1.
        source["rollout_log_probs"] = torch.where(mask == 1, values - math.log(mass), 0.0).clamp(max=0.0).tolist()


def zero_fill(case: Case) -> None:
    for i in case.some(0.3):
        sample = case.train["samples"][i]
        sample["log_probs"] = sample["log_probs"].clone()
        n = len(sample["log_probs"])
        sample["log_probs"][n // 2 : n // 2 + max(6, n // 8)] = 0.0


def sample_swap(case: Case) -> None:
    """Two samples of one length exchange their log-probs, or two of any length their places."""
    samples = case.train["samples"]
    i, j = torch.randperm(len(samples), generator=case.random)[:2].tolist()
    if case.uniform() < 0.5:
        samples[i]["rollout_position"], samples[j]["rollout_position"] = (
            samples[j]["rollout_position"],
            samples[i]["rollout_position"],
        )
        return
    shorter = min(samples[i]["response_lengths"], samples[j]["response_lengths"])
    for k in (i, j):  # make them equally long
        sample, source = samples[k], case.rollout["samples"][k]
        cut = sample["response_lengths"] - shorter
        if cut:
            sample["tokens"] = sample["tokens"][:-cut]
            source["tokens"] = source["tokens"][:-cut]
        sample["loss_masks"] = torch.ones(shorter, dtype=torch.int32)
        source["loss_mask"] = [1] * shorter
        picked = sample["tokens"][-shorter:]
        source["rollout_log_probs"] = log_softmax_of(case.logits[k][:shorter], picked).tolist()
        sample["log_probs"] = sample["log_probs"][:shorter]
        sample["total_lengths"] -= cut
        sample["response_lengths"] = source["response_length"] = shorter
    samples[i]["log_probs"], samples[j]["log_probs"] = samples[j]["log_probs"], samples[i]["log_probs"]


def mask_shift(case: Case) -> None:
    by = 1 if case.uniform() < 0.5 else -1
    for sample in case.train["samples"]:
        sample["loss_masks"] = sample["loss_masks"].roll(by)


def dtype_rounding(case: Case) -> None:
    for sample, source in zip(case.train["samples"], case.rollout["samples"], strict=True):
        sample["log_probs"] = torch.tensor(source["rollout_log_probs"]).bfloat16().float()


def stale_weights(case: Case) -> None:
    for i, (sample, source) in enumerate(zip(case.train["samples"], case.rollout["samples"], strict=True)):
        age = i % 3
        source["weight_versions"] = [str(ROLLOUT_ID - age), str(ROLLOUT_ID)]
        noise = torch.randn(sample["log_probs"].shape, generator=case.random)
        sample["log_probs"] = (sample["log_probs"] + 0.08 * age * noise).clamp(max=-1e-6)


def non_finite(case: Case) -> None:
    for i in case.some(0.3):
        sample = case.train["samples"][i]
        sample["log_probs"] = sample["log_probs"].clone()
        sample["log_probs"][: 1 + i % 3] = [math.nan, -math.inf, torch.finfo(torch.float32).min][i % 3]


def low_probability_tail(case: Case) -> None:
    for sample, source in zip(case.train["samples"], case.rollout["samples"], strict=True):
        rollout = torch.tensor(source["rollout_log_probs"])
        lowest = rollout.argsort()[: max(1, len(rollout) // 15)]
        rollout[lowest] = -8 - 6 * torch.rand(len(lowest), generator=case.random)
        source["rollout_log_probs"] = rollout.tolist()
        away = torch.randn(len(lowest), generator=case.random)
        away = away.sign() * (1 + away.abs())
        sample["log_probs"] = sample["log_probs"].clone()
        sample["log_probs"][lowest] = rollout[lowest] + away


def join_unconfirmed(case: Case) -> None:
    for i in case.some(0.3):
        sample = case.train["samples"][i]
        sample["tokens"] = sample["tokens"].clone()
        sample["tokens"][-1] = (sample["tokens"][-1] + 1) % VOCABULARY


def incomplete(case: Case) -> None:
    gone = int(case.uniform() < 0.5)
    case.train["samples"] = [one for one in case.train["samples"] if one["data_parallel_rank"] != gone]
    case.train["dp_shards"] = [one for one in case.train["dp_shards"] if one["data_parallel_rank"] != gone]


FAULTS: dict[str, Callable[[Case], None]] = {
    "token-shift": token_shift,
    "cp-boundary": cp_boundary,
    "temperature": temperature,
    "truncated-sampling": truncated_sampling,
    "zero-fill": zero_fill,
    "sample-swap": sample_swap,
    "mask-shift": mask_shift,
    "dtype-rounding": dtype_rounding,
    "stale-weights": stale_weights,
    "non-finite": non_finite,
    "low-probability-tail": low_probability_tail,
    "join-unconfirmed": join_unconfirmed,
    "incomplete": incomplete,
}


def faulty(code: str, size: Size, seed: int) -> Case:
    """A clean pair with one fault."""
    case = clean(size, seed)
    FAULTS[code](case)
    return case
