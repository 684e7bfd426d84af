"""Parameters under names that mean the same on every rank."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_model_config

_LAYER = re.compile(r"\.layers\.(\d+)\.")


def named_params_and_buffers(
    args: Namespace, model: Sequence[Any], convert_to_global_name: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of all model chunks; layers are counted over the whole pipeline."""
    for stage, chunk in enumerate(model):
        virtual = None if args.virtual_pipeline_model_parallel_size is None else stage
        offset = get_transformer_layer_offset(get_model_config(chunk), vp_stage=virtual)
        for name, parameter in chunk.named_parameters():
            if convert_to_global_name:
                name = _LAYER.sub(lambda found, by=offset: f".layers.{int(found[1]) + by}.", name)  # type: ignore[misc]
            yield name, parameter
