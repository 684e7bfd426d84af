"""A rank hook: what autograd gives each response token's log-prob in slime's own training step, to a file per rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def install(rank: int, _actor_module: Any, args: Any) -> None:
    from slime.backends.megatron_utils import loss

    real = loss.get_log_probs_and_entropy
    folder = Path(args.save_debug_train_data).parents[1] / "gradients"
    folder.mkdir(exist_ok=True)
    seen: list[tuple[list[int], torch.Tensor]] = []

    def keeping(tokens: list[int]) -> Callable[[torch.Tensor], None]:
        def keep(gradient: torch.Tensor) -> None:
            seen.append((tokens, gradient.clone()))
            torch.save(seen, folder / f"{rank}.pt")

        return keep

    def observed(*positional: Any, **named: Any) -> Any:
        answer = real(*positional, **named)
        found = answer[1] if isinstance(answer, tuple) else answer
        for tokens, log_prob in zip(named["unconcat_tokens"], found["log_probs"], strict=True):
            if log_prob.requires_grad:
                log_prob.register_hook(keeping(tokens.tolist()))
        return answer

    loss.__dict__["get_log_probs_and_entropy"] = observed
