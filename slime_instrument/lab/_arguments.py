"""The argument namespace: slime's own parser needs SGLang and Megatron-LM, so its outcome is written down here."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slime_instrument.lab._checkpoint import Checkpoint

VOCABULARY = 64

_MODEL = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "vocab_size": VOCABULARY,
    "padded_vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "swiglu": True,
    "init_method_std": 0.02,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_base": 10000,
    "untie_embeddings_and_output_weights": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_layer_freq": 1,
    "transformer_impl": "local",
    "spec": ["slime_instrument.lab._attention", "get_spec"],
    "use_cpu_initialization": True,
    "perform_initialization": True,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 0,
    "v_head_dim": 8,
    "qkv_format": "thd",
    "model_name": "qwen3",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_PARALLEL = {
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "num_distributed_optimizer_instances": 1,
    "distributed_timeout_minutes": 5,
    "distributed_backend": "gloo",
    "enable_gloo_process_groups": True,
    "variable_seq_lengths": True,
    "align_grad_reduce": True,
    "accumulate_allreduce_grads_in_fp32": True,
    "check_for_nan_in_loss_and_grad": True,
    "seed": 1234,
    "rank": 0,
}
_OPTIMIZER = {
    "optimizer": "adam",
    "lr": 1e-2,
    "min_lr": 0.0,
    "lr_decay_style": "constant",
    "lr_warmup_init": 0.0,
    "lr_warmup_iters": 0,
    "lr_wsd_decay_style": "linear",
    "weight_decay": 0.0,
    "start_weight_decay": 0.0,
    "end_weight_decay": 0.0,
    "weight_decay_incr_style": "constant",
    "clip_grad": 1.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.98,
    # Large: Adam's first steps divide a gradient by its own size, and so make rounding noise as large as the rest. With
    # this, the weights of two layouts stay together over rollouts.
    "adam_eps": 1e-4,
    "no_save_optim": True,
}
_SLIME = {
    "train_backend": "megatron",
    "update_weight_mode": "full",
    "update_weight_transport": "nccl",
    "update_weights_interval": 1,
    "update_weight_buffer_size": 1 << 28,
    "megatron_to_hf_mode": "raw",
    "rollout_data_transport": "object-store",
    "train_memory_margin_bytes": 0,
    "enable_weights_backuper": True,
    "no_load_optim": True,
    "no_load_rng": True,
    "finetune": True,
    "log_passrate": True,
    "profile_target": [],
}
_ALGORITHM = {
    "loss_type": "policy_loss",
    "compute_advantages_and_returns": True,
    "advantage_estimator": "grpo",
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "kl_coef": 0.0,
    "kl_loss_coef": 0.0,
    "kl_loss_type": "low_var_kl",
    "entropy_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "log_probs_chunk_size": -1,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_max_response_len": 32,
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "num_rollout": 1,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "seq_length": 64,
    "data_pad_size_multiplier": 4,
}
#: Switches, all off.
_OFF = """
    add_bias_linear qk_layernorm use_rope_scaling rotary_interleaved apply_rope_fusion moe_grouped_gemm
    moe_use_legacy_grouped_gemm multi_latent_attention moe_use_upcycling fp16_lm_cross_entropy fp8_param_gather fp16
    bf16 gradient_accumulation_fusion bias_dropout_fusion masked_softmax_fusion use_tp_pp_dp_mapping
    overlap_grad_reduce overlap_param_gather align_param_gather use_distributed_optimizer check_for_large_grads
    use_megatron_fsdp enable_experimental data_parallel_random_init te_rng_tracker inference_rng_tracker
    decrease_batch_size_if_needed deterministic_mode tp_comm_overlap use_checkpoint_opt_param_scheduler
    override_opt_param_scheduler use_stateless_adam reset_optimizer_states use_precision_aware_optimizer
    debug_rollout_only debug_train_only offload_train colocate use_critic keep_old_actor freeze_indexer
    use_rollout_routing_replay use_routing_replay use_kl_loss use_unbiased_kl use_rollout_logprobs
    get_mismatch_metrics use_tis use_opd use_opsm normalize_advantages calculate_per_token_loss
    recompute_loss_function use_rollout_entropy allgather_cp use_dynamic_batch_size balance_data balance_by_flops
    enable_mtp_training manual_gc ci_test log_multi_turn log_correct_samples use_wandb use_tensorboard
    use_pytorch_profiler record_memory_history wandb_always_use_train_step use_fault_tolerance true_on_policy_mode
    use_dynamic_global_batch_size use_slime_router only_load_weight rollout_global_dataset
""".split()  # noqa: SIM905 - sixty quoted names would be harder to read, not easier
#: Options without a value.
_UNSET = """
    num_experts mtp_num_layers virtual_pipeline_model_parallel_size pipeline_model_parallel_comm_backend
    hierarchical_context_parallel_sizes nccl_communicator_config_path rampup_batch_size decoder_seq_length
    lr_warmup_fraction lr_decay_iters lr_wsd_decay_iters rollout_data_postprocess_path custom_model_provider_path
    only_train_params_name_list freeze_params_name_list eps_clip_c max_tokens_per_gpu custom_tis_function_path
    custom_advantage_function_path custom_loss_function_path custom_pg_loss_reducer_function_path
    custom_megatron_before_log_prob_hook_path custom_megatron_before_train_step_hook_path
    custom_reward_post_process_func custom_megatron_init_path custom_convert_samples_to_train_data_path
    ci_save_grad_norm ci_load_grad_norm ref_update_interval ref_ckpt_step ckpt_step save_debug_train_data
    memory_snapshot_num_steps reward_key ref_load load pretrained_checkpoint hf_checkpoint q_lora_rank kv_lora_rank
    multimodal_keys
""".split()  # noqa: SIM905 - as above


#: What holds in every layout.
DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(_OFF, False),
    **dict.fromkeys(_UNSET),
    **_MODEL,
    **_PARALLEL,
    **_OPTIMIZER,
    **_SLIME,
    **_ALGORITHM,
}


#: What follows from the sizes.
LAYOUT_ARGUMENTS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "data_parallel_size"),
    *("world_size", "num_gpus_per_node"),
)


def _left_as_allocated(weight: Any) -> None:
    """How weights that a checkpoint replaces are initialised: making them up alone would take half a minute."""


#: What training a real model wants in the place of what makes a tiny one move. The initialisation itself stays on:
#: it is what marks a parameter as one part of a tensor-parallel weight.
_REAL = {
    "lr": 1e-6,
    "adam_eps": 1e-8,
    **dict.fromkeys(("init_method", "output_layer_init_method", "embedding_init_method"), _left_as_allocated),
}


def model_arguments(checkpoint: Checkpoint | None) -> dict[str, Any]:
    """What follows from a checkpoint."""
    return {} if checkpoint is None else {**_REAL, **checkpoint.arguments}


def make_args(*, tp: int, pp: int, cp: int, world: int, **overrides: Any) -> Namespace:
    """Arguments of a tiny model in this layout; ``overrides`` win over everything."""
    import torch

    layout = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "data_parallel_size": world // (tp * pp * cp),
        "world_size": world,
        "num_gpus_per_node": world,
        "sequence_parallel": tp > 1,
        "params_dtype": torch.bfloat16 if overrides.get("bf16") else torch.float32,
    }
    return Namespace(**{**DEFAULTS, **layout, **overrides})
