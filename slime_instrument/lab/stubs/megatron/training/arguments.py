"""From the argument namespace to Megatron-Core's model configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


def core_transformer_config_from_args(args: Any, config_class: Any = None) -> Any:
    names = {entry.name for entry in dataclasses.fields(TransformerConfig)}
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    values |= {
        "persist_layer_norm": False,
        "deallocate_pipeline_outputs": True,
        "pipeline_dtype": args.params_dtype,
        "batch_p2p_comm": True,
        "num_moe_experts": args.num_experts,
    }
    if args.swiglu:
        values |= {"activation_func": F.silu, "gated_linear_unit": True, "bias_activation_fusion": False}
    return (config_class or TransformerConfig)(**values)


def parse_args(*_args: Any, **_kwargs: Any) -> Any:
    raise NotImplementedError("the lab writes its arguments down instead of parsing them")


def validate_args(args: Any, *_args: Any, **_kwargs: Any) -> Any:
    return args
