"""What samples carry in some recipes beyond tokens and log-probs, and what the trainer then needs to take it.

Values are seeded by the sample's tokens or position, so that they are the same on every layout.
"""

from __future__ import annotations

import inspect
import random
import zlib
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from slime_instrument.lab._arguments import VOCABULARY

#: Name -> what it is.
EXTRAS = {
    "teacher": "teacher log-probs, as an inference engine returns them",
    "multimodal": "image features, and None for every other sample",
    "top-p": "the token ids that top-p sampling kept, ragged",
    "routed-experts": "the experts that the inference engine chose",
    "critic-values": "a critic's values, handed to the actor",
    "routing-replay": "a router that records and replays its choices",
}


def add_to(sample: Any, args: Namespace, position: int, names: Sequence[str]) -> None:
    """Put what ``names`` say on a sample, under the attributes that slime reads."""
    import torch

    rng = random.Random(1000 + position)
    response = sample.response_length
    if "teacher" in names:
        # A tensor where slime's own reward function leaves one (up to v0.2.2), else a list.
        values = [-rng.random() * 3 for _ in range(response)]
        sample.teacher_log_probs = torch.tensor(values) if args.advantage_estimator != "grpo" else values
    if "multimodal" in names:
        features = torch.arange(float(6 * (position + 1))).reshape(position + 1, 6)
        found = None if position % 2 else {"pixel_values": features}
        sample.multimodal_train_inputs = sample.multimodal_inputs = found
    if "top-p" in names:
        kept = [sorted({token, *rng.sample(range(VOCABULARY), rng.randint(0, 5))}) for token in _response(sample)]
        offsets = [0]
        for ids in kept:
            offsets.append(offsets[-1] + len(ids))
        sample.rollout_top_p_token_ids = [token for ids in kept for token in ids]
        sample.rollout_top_p_token_offsets = offsets
    if "routed-experts" in names:
        from slime_instrument.lab import _releases

        # v0.2.0 replays one row per token; later releases, and what engines return, have none for the last one.
        lacking = 0 if "routing-replay" in names and _releases.ships_one_box() else 1
        chosen = [
            [rng.sample(range(args.num_experts or 4), args.moe_router_topk or 2) for _ in range(args.num_layers)]
            for _ in range(max(0, len(sample.tokens) - lacking))
        ]
        sample.rollout_routed_experts = torch.tensor(chosen, dtype=torch.int32).numpy()


def _response(sample: Any) -> list[int]:
    tokens: list[int] = sample.tokens
    return tokens[len(tokens) - sample.response_length :]


def prepare(actor_module: Any, names: Sequence[str]) -> None:
    """Make the trainer take what the samples carry; before the actor is built."""
    if "multimodal" in names:
        _ignore_images()
    if "routing-replay" in names:
        from slime_instrument.lab import _routing

        _routing.install()
    if "critic-values" in names and hasattr(actor_module, "sync_actor_critic_data"):
        # Before v0.3.0 the critic is another actor, which sends its values at this point.
        def receive(_args: Any, rollout_data: dict[str, Any], _groups: Any) -> None:
            rollout_data["values"] = _values(rollout_data)

        actor_module.__dict__["sync_actor_critic_data"] = receive
        actor_module.MegatronTrainRayActor._actor_critic_groups = None


def external_data(actor: Any, boxes: Any, names: Sequence[str], dp_rank: int) -> dict[str, Any]:
    """Further keyword arguments of ``actor.train``: since v0.3.0 a critic's values come in this way."""
    if "critic-values" not in names or "external_data" not in inspect.signature(actor.train).parameters:
        return {}
    import ray

    shipped = dict(ray.get(boxes[dp_rank].inner))
    shipped["total_lengths"] = [shipped["total_lengths"][position] for position in shipped["partition"]]
    return {"external_data": {"values": _values(shipped)}}


def _values(rollout_data: dict[str, Any]) -> list[Any]:
    """This rank's part of each sample's values, cut by slime's own function; the last pipeline stage's own."""
    import torch
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    values = []
    lengths = zip(rollout_data["total_lengths"], rollout_data["response_lengths"], strict=True)
    for tokens, (total, response) in zip(rollout_data["tokens"], lengths, strict=True):
        generator = torch.Generator().manual_seed(zlib.crc32(bytes(int(token) for token in tokens)))
        values.append(slice_log_prob_with_cp(torch.rand(response, generator=generator), total, response))
    return values


def _ignore_images() -> None:
    """The lab's model reads text only; slime hands it the images as further keywords."""
    from megatron.core.models.gpt import GPTModel

    forward = GPTModel.forward

    def without_images(self: Any, *args: Any, pixel_values: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    GPTModel.forward = without_images


def custom_loss(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any, **_more: Any) -> Any:
    """For ``--custom-loss-function-path``: a loss without log-probs."""
    loss = logits.float().pow(2).mean() * 1e-3
    return loss, {"loss": loss.clone().detach()}
