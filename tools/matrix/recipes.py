"""The training recipes: what slime is told, and what its dump must then look like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

#: As close as two layouts come in float32.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Recipe:
    """``exact``: whether advantages are free of the model's rounding; ``advantages_follow_layout``: slime's own depend
    on the layout, so that they are held against slime's own file only. ``tolerance``: of model fields between layouts.
    ``since``/``until``: the releases that know the recipe."""

    name: str
    title: str
    overrides: dict[str, Any] = field(default_factory=dict)
    steps: int = 1
    with_ref: bool = False
    extras: tuple[str, ...] = ()
    samples: str = "default"
    exact: bool = True
    advantages_follow_layout: bool = False
    tolerance: float = TOLERANCE
    dump_lacks_log_probs: bool = False
    since: str = "v0.2.0"
    until: str | None = None


_MOE = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
}
_MISMATCH = {"tis_clip": 2.0, "tis_clip_low": 0.0}
_CUSTOM = {"loss_type": "custom_loss", "custom_loss_function_path": "slime_instrument.lab._extras.custom_loss"}

RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("grpo", "GRPO, log-probs reused from the training forward where the release does so"),
        Recipe("rollout-logprobs", "`--use-rollout-logprobs`", {"use_rollout_logprobs": True}),
        Recipe(
            "rollout-logprobs-steps",
            "`--use-rollout-logprobs`, two optimizer steps",
            {"use_rollout_logprobs": True},
            steps=2,
            tolerance=1e-4,
        ),
        Recipe("steps", "two optimizer steps, log-probs recomputed", steps=2),
        Recipe("recompute-loss", "`--recompute-loss-function`", {"recompute_loss_function": True}),
        Recipe("dynamic", "dynamic batch size", {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 48}),
        Recipe("balance", "`--balance-data`", {"balance_data": True}),
        Recipe("gspo", "GSPO", {"advantage_estimator": "gspo"}),
        Recipe("tis", "TIS", {"use_tis": True, **_MISMATCH}),
        Recipe("mismatch", "mismatch metrics, log-probs recomputed", {"get_mismatch_metrics": True, **_MISMATCH}),
        Recipe("opsm", "OPSM", {"use_opsm": True, "opsm_delta": 0.1}, since="v0.2.1"),
        Recipe(
            "ref-kl",
            "reference model with KL in reward and loss",
            {"use_kl_loss": True, "kl_coef": 0.05, "kl_loss_coef": 0.1},
            with_ref=True,
            exact=False,
        ),
        Recipe(
            "ppo",
            "PPO with a critic's values",
            {"advantage_estimator": "ppo", "use_critic": True, "gamma": 1.0, "lambd": 0.95, "value_clip": 0.2},
            extras=("critic-values",),
            samples="long",
            exact=False,
        ),
        Recipe(
            "opd",
            "OPD, teacher log-probs from an engine",
            {"use_opd": True, "opd_type": "sglang", "opd_kl_coef": 0.5},
            extras=("teacher",),
            exact=False,
            since="v0.2.3",
        ),
        Recipe(
            "opd-estimator",
            "OPD as an advantage estimator",
            {"advantage_estimator": "on_policy_distillation"},
            extras=("teacher",),
            exact=False,
            until="v0.2.2",
        ),
        Recipe(
            "entropy", "`--use-rollout-entropy` with a reference model", {"use_rollout_entropy": True}, with_ref=True
        ),
        Recipe("whitened", "`--normalize-advantages`", {"normalize_advantages": True}, advantages_follow_layout=True),
        Recipe("bf16", "bf16", {"bf16": True}, tolerance=0.15),
        Recipe("distributed-optimizer", "distributed optimizer", {"use_distributed_optimizer": True}),
        Recipe(
            "sft",
            "SFT",
            {"loss_type": "sft_loss", "compute_advantages_and_returns": False},
            dump_lacks_log_probs=True,
        ),
        Recipe(
            "custom-loss",
            "custom loss without log-probs",
            {**_CUSTOM, "compute_advantages_and_returns": False},
            dump_lacks_log_probs=True,
        ),
        Recipe(
            "routing-replay",
            "mixture of experts, `--use-routing-replay`",
            {**_MOE, "use_routing_replay": True},
            extras=("routing-replay",),
            tolerance=1e-4,
        ),
        Recipe(
            "rollout-routing-replay",
            "mixture of experts, `--use-rollout-routing-replay`",
            # v0.2.0 pads what it replays to 128 tokens, whatever it pads the tokens to.
            {
                **_MOE,
                "use_routing_replay": True,
                "use_rollout_routing_replay": True,
                "data_pad_size_multiplier": 128,
            },
            extras=("routing-replay", "routed-experts"),
            tolerance=1e-4,
        ),
        Recipe(
            "routed-experts",
            "routed experts shipped but not replayed",
            {"moe_router_topk": 2},
            extras=("routed-experts",),
        ),
        Recipe("multimodal", "image inputs, None among them", extras=("multimodal",)),
        Recipe("top-p", "ragged top-p payload", {"rollout_top_p": 0.9}, extras=("top-p",)),
    )
}
