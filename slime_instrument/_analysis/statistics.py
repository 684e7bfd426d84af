"""How sure a pattern is: upper bounds of tail probabilities, as logarithms so that they never underflow."""

from __future__ import annotations

import math

import torch

__all__ = ["log_all_hit", "log_student_tail"]


def log_student_tail(t: torch.Tensor, df: torch.Tensor) -> torch.Tensor:
    """Upper bound of log P(\\|T\\| > t) of Student's distribution, elementwise; 0 where ``df`` < 1.

    The density's own tail, integrated without its 1: exact in the limit of large t, too large (so: cautious) below.
    """
    t, df = t.abs().double().clamp(min=1e-12), df.double()
    safe = df.clamp(min=1.0)
    scale = torch.lgamma((safe + 1) / 2) - torch.lgamma(safe / 2) - 0.5 * (safe * math.pi).log()
    # n = df: the integral of (1 + x²/n)^-(n+1)/2 from t is at most (1 + t²/n)^-(n-1)/2 / t * n/(n-1); n/t for n = 1.
    shrunk = -(safe - 1) / 2 * torch.log1p(t.square() / safe)
    factor = torch.where(safe > 1, safe / (safe - 1).clamp(min=0.5), safe)
    bound = math.log(2) + scale + shrunk - t.log() + factor.log()
    return torch.where(df >= 1, bound.clamp(max=0.0), torch.zeros_like(bound))


def log_all_hit(hits: int, n: int, rate: float) -> float:
    """Upper bound (Chernoff) of log P(at least ``hits`` of ``n``), each with probability ``rate``."""
    if n == 0 or hits <= n * rate:
        return 0.0
    share = hits / n
    bound = 0.0
    if share > 0:
        bound += share * math.log(rate / share) if rate > 0 else -math.inf
    if share < 1:
        bound += (1 - share) * math.log((1 - rate) / (1 - share))
    return n * bound
