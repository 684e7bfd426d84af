"""Builds this pipeline stage of the model, and its optimizer."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.spec_utils import import_module
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.training import get_model


def initialize_model_and_optimizer(args: Namespace) -> tuple[list[Any], Any]:
    def provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
        config = core_transformer_config_from_args(args)
        return GPTModel(
            config=config,
            transformer_layer_spec=import_module(args.spec)(args, config, vp_stage),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            parallel_output=True,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_percent=args.rotary_percent,
            rotary_base=args.rotary_base,
            vp_stage=vp_stage,
        )

    model = get_model(provider, ModelType.encoder_or_decoder)
    known = {entry.name for entry in dataclasses.fields(OptimizerConfig)}
    config = OptimizerConfig(**{name: getattr(args, name) for name in known if hasattr(args, name)})
    config.timers = None
    optimizer = get_megatron_optimizer(
        config=config, model_chunks=model, use_gloo_process_groups=args.enable_gloo_process_groups
    )
    return model, optimizer
