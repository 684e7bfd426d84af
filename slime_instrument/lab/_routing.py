"""Routing replay needs a Megatron-LM that slime's images patch; this gives Megatron-Core's router the same two hooks.

Each router is registered with slime's replay, and its choice of experts goes through slime's own function.
"""

from __future__ import annotations

import os
from typing import Any

import torch


def install() -> None:
    """Before the model is built, in the rank's own process."""
    from megatron.core.transformer.moe import router
    from slime.utils import routing_replay

    os.environ["ENABLE_ROUTING_REPLAY"] = "1"
    os.environ.setdefault("ROUTING_REPLAY_STAGE", "fallthrough")
    build = router.TopKRouter.__init__

    def build_and_register(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        routing_replay.register_routing_replay(self)

    router.TopKRouter.__init__ = build_and_register

    def plain_top_k(scores: torch.Tensor, topk: int, **_groups: Any) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = torch.topk(scores, k=topk, dim=1)
        return values, indices

    choose = routing_replay.get_routing_replay_compute_topk(plain_top_k)

    def route(logits: torch.Tensor, topk: int, **_options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense (tokens, experts) probabilities, and which experts each token goes to."""
        scores, chosen = choose(logits, topk)
        chosen = chosen.long()
        probabilities = torch.zeros_like(logits).scatter(1, chosen, torch.softmax(scores, dim=-1))
        return probabilities, torch.zeros_like(logits, dtype=torch.bool).scatter(1, chosen, True)

    router.topk_routing_with_score_function = route
