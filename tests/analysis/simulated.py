"""Pairs whose tokens are really sampled, from logits that are known: each fault acts where it acts in an engine.

A made-up language of 400 tokens: a few frequent ones, and at each position logits of its own, from nearly certain to
flat. Training adds what a kernel does: independent errors of the logits. So temperature, truncation and penalties move
the normaliser, tokens repeat, and nothing is tied to log μ that is not in a real engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slime_instrument._format.dumps import RolloutDump, TrainDump, rollout_dump_of, train_dump_of

VOCABULARY = 400
PROMPT = 12
ROLLOUT_ID = 5


@dataclass(frozen=True)
class Fault:
    """What is different between the two sides. ``share``: part of the samples that it concerns."""

    engine_temperature: float = 1.0
    train_temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    context: float = 0.0  # error of the logits at the first token; fades with the root of the place
    precision: float = 0.0  # error of the logits everywhere, beside the kernels'
    stale: float = 0.0  # error of the logits of older samples, with versions in the dump
    share: float = 1.0
    raw_log_probs: bool = False
    rollout_dtype: torch.dtype = torch.float32
    train_dtype: torch.dtype = torch.float32
    entropy: bool = False


@dataclass(frozen=True)
class Shape:
    """How large a pair is, how sure the model is of its tokens, and how much two kernels differ."""

    samples: int = 48
    response: int = 48
    sure: float = 0.4  # share of nearly certain positions
    sharpness: float = 1.0  # scale of the logits elsewhere
    kernel: float = 0.06  # error of a logit


@dataclass
class Pair:
    """Both dumps."""

    rollout: dict[str, Any]
    train: dict[str, Any]
    concerned: list[int] = field(default_factory=list)

    def records(self) -> tuple[RolloutDump, TrainDump]:
        return (
            rollout_dump_of(Path(f"rollout_data/{ROLLOUT_ID}.pt"), self.rollout),
            train_dump_of(Path(f"train_data/{ROLLOUT_ID}.pt"), self.train),
        )


def pair(fault: Fault = Fault(), shape: Shape = Shape(), seed: int = 0) -> Pair:
    """Sample a pair. All samples advance together, token by token."""
    random = torch.Generator().manual_seed(seed)
    n, length = shape.samples, shape.response
    concerned = torch.zeros(n, dtype=torch.bool)
    concerned[torch.randperm(n, generator=random)[: round(fault.share * n)]] = True
    frequent = 4.0 - 1.1 * torch.arange(1, VOCABULARY + 1).double().log()
    prompt = torch.multinomial(frequent.softmax(-1).expand(n, -1), PROMPT, replacement=True, generator=random)
    counts = torch.zeros(n, VOCABULARY, dtype=torch.float64)
    seen = torch.zeros(n, VOCABULARY, dtype=torch.bool).scatter_(1, prompt, True)
    drift = torch.randn(n, VOCABULARY, generator=random, dtype=torch.float64) * fault.stale
    tokens, logged, trained, entropies = [], [], [], []
    for i in range(length):
        sharp = torch.rand(n, 1, generator=random) < shape.sure
        scale = torch.where(sharp, 0.7, shape.sharpness * (1 + torch.rand(n, 1, generator=random)))
        logits = frequent + torch.randn(n, VOCABULARY, generator=random, dtype=torch.float64) * scale
        top = torch.randint(0, VOCABULARY, (n, 1), generator=random)
        top = torch.where(torch.rand(n, 1, generator=random) < 0.5, prompt[:, :1], top)
        lift = torch.where(sharp, 9.0 + 6.0 * torch.rand(n, 1, generator=random), 3.0).double()
        logits = 8.0 + logits.scatter_add(1, top, lift)
        plain = logits.log_softmax(-1)
        changed = _processed(logits, seen, counts, fault)
        wanted = torch.where(concerned[:, None], changed, plain)
        token = torch.multinomial(wanted.exp(), 1, generator=random)
        said = plain if fault.raw_log_probs else wanted
        error = shape.kernel + torch.zeros(n, 1)
        extra = math.hypot(fault.precision, fault.context / math.sqrt(1 + i))
        error = torch.where(concerned[:, None], torch.hypot(error, torch.tensor(extra)), error)
        theirs = logits + torch.randn(n, VOCABULARY, generator=random, dtype=torch.float64) * error
        theirs = theirs + torch.where(concerned[:, None], drift * torch.randn(n, 1, generator=random), 0.0)
        divided = torch.where(concerned[:, None], theirs / fault.train_temperature, theirs).log_softmax(-1)
        tokens.append(token)
        logged.append(said.gather(1, token))
        trained.append(divided.gather(1, token))
        entropies.append(-(divided.exp() * divided).sum(-1, keepdim=True))
        seen.scatter_(1, token, True)
        counts.scatter_add_(1, token, torch.ones(n, 1, dtype=torch.float64))
    columns = (torch.cat(own, 1) for own in (tokens, logged, trained, entropies))
    return _dumps(fault, concerned, prompt, *columns)


def _processed(logits: torch.Tensor, seen: torch.Tensor, counts: torch.Tensor, fault: Fault) -> torch.Tensor:
    """Log-probs that the engine samples from."""
    z = torch.where(seen, torch.where(logits > 0, logits / fault.repetition, logits * fault.repetition), logits)
    z = (z - fault.frequency * counts - fault.presence * (counts > 0)) / fault.engine_temperature
    probs = z.softmax(-1)
    keep = probs >= fault.min_p * probs.amax(-1, keepdim=True)
    if fault.top_k:
        keep &= z >= z.topk(fault.top_k).values[:, -1:]
    if fault.top_p < 1:
        order = probs.argsort(descending=True)
        ordered = probs.gather(1, order)
        keep &= torch.zeros_like(keep).scatter(1, order, ordered.cumsum(-1) - ordered < fault.top_p)
    return z.masked_fill(~keep, -math.inf).log_softmax(-1)


def _dumps(
    fault: Fault,
    concerned: torch.Tensor,
    prompt: torch.Tensor,
    tokens: torch.Tensor,
    logged: torch.Tensor,
    trained: torch.Tensor,
    entropies: torch.Tensor,
) -> Pair:
    rollout, train = [], []
    length = tokens.shape[1]
    for i in range(len(tokens)):
        ids = torch.cat([prompt[i], tokens[i]])
        old = bool(fault.stale) and bool(concerned[i])
        rollout.append(
            {
                "index": i,
                "tokens": ids.tolist(),
                "response_length": length,
                "rollout_log_probs": logged[i].float().to(fault.rollout_dtype).float().tolist(),
                "loss_mask": None,
                "status": "completed",
                "reward": 0.0,
                "remove_sample": False,
                "weight_versions": [str(ROLLOUT_ID - old)],
            }
        )
        sample = {
            "data_parallel_rank": 0,
            "rollout_position": i,
            "sample_index": i,
            "tokens": ids,
            "response_lengths": length,
            "total_lengths": PROMPT + length,
            "loss_masks": torch.ones(length, dtype=torch.int32),
            "log_probs": trained[i].float().to(fault.train_dtype).float(),
        }
        train.append(sample | ({"entropy": entropies[i].float()} if fault.entropy else {}))
    shard = {"rank": 0, "data_parallel_rank": 0, "partition": list(range(len(train)))}
    payload = {"format_version": 2, "rollout_id": ROLLOUT_ID, "rank": 0, "samples": train, "dp_shards": [shard]}
    return Pair({"rollout_id": ROLLOUT_ID, "samples": rollout}, payload, concerned.nonzero().flatten().tolist())
