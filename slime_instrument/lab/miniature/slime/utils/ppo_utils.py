"""Token-level arithmetic of the losses, over logits that are split along the vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy


def compute_log_probs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probability of each target; ``logits`` are [tokens, vocabulary of this rank]."""
    # Cloned: Megatron-Core's cross entropy subtracts the maximum in place.
    loss: torch.Tensor = vocab_parallel_cross_entropy(logits.clone().unsqueeze(1), targets.unsqueeze(1))
    return -loss.squeeze(1)


@torch.no_grad()
def compute_entropy(logits: torch.Tensor, group: Any) -> torch.Tensor:
    """Entropy of each token's distribution, for reporting only."""
    peak = logits.max(dim=-1).values
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - peak.unsqueeze(-1)
    weights = shifted.exp()
    sums = torch.stack([weights.sum(-1), (weights * shifted).sum(-1)])
    dist.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]


def compute_policy_loss(
    ppo_kl: torch.Tensor, advantages: torch.Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clipped surrogate per token, and where the clip won."""
    ratio = (-ppo_kl).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    return torch.maximum(plain, clipped), (clipped > plain).float()


def compute_approx_kl(log_probs: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The low-variance estimate of the divergence from ``base``, per token, kept within 10."""
    difference = base - log_probs
    return (difference.exp() - difference - 1.0).clamp(-10.0, 10.0)
