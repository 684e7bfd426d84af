"""Attention on the CPU over packed sequences with context parallelism, given to Megatron-Core as a layer spec.

Megatron-Core's own unfused attention knows neither packing nor context parallelism, and what does is CUDA only. Here
the keys and values of all context-parallel ranks are gathered, and a mask built from (sequence, position in sequence)
decides who sees whom.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

Positions = tuple[torch.Tensor, torch.Tensor]


class GatherFromContextParallel(torch.autograd.Function):
    """All ranks' shards, stacked by rank; backward sums what every rank wants from this one's shard."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        shards = [torch.empty_like(shard) for _ in range(group.size())]
        dist.all_gather(shards, shard.contiguous(), group=group)
        return torch.stack(shards)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient[ctx.group.rank()], None


def zigzag_positions(cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int) -> Positions:
    """(sequence, position) of each local token: of 2·cp equal chunks, a rank owns number r and number 2·cp-1-r."""
    sequences, positions = [], []
    for sequence, length in enumerate((cu_seqlens[1:] - cu_seqlens[:-1]).tolist()):
        chunk, rest = divmod(length, 2 * cp_size)
        if cp_size == 1 or rest:
            # A rest only has the padding at the end of a micro-batch, which every rank adds for itself.
            position = torch.arange(length // cp_size)
        else:
            chunks = torch.arange(length).reshape(2 * cp_size, chunk)
            position = chunks[[cp_rank, 2 * cp_size - 1 - cp_rank]].flatten()
        sequences.append(torch.full_like(position, sequence))
        positions.append(position)
    return torch.cat(sequences), torch.cat(positions)


def contiguous_positions(cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int) -> Positions:
    """(sequence, position) under ``--allgather-cp``: the whole packed stream is cut into cp contiguous pieces."""
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.cat([torch.arange(int(length)) for length in lengths])
    return sequence.chunk(cp_size)[cp_rank], position.chunk(cp_size)[cp_rank]


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """A ``core_attention`` for Megatron-Core's local spec."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_rest: Any,
    ) -> None:
        super().__init__(config=config)
        self.cp_group = pg_collection.cp if pg_collection is not None else mpu.get_context_parallel_group()
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
        **_rest: Any,
    ) -> torch.Tensor:
        from megatron.training.global_vars import get_args

        locate = contiguous_positions if get_args().allgather_cp else zigzag_positions
        size, rank = self.cp_group.size(), self.cp_group.rank()
        cu_seqlens = packed_seq_params.cu_seqlens_q
        sequence, position = locate(cu_seqlens, size, rank)
        key_sequence, key_position = sequence, position
        if size > 1:
            everyone = [locate(cu_seqlens, size, peer) for peer in range(size)]
            key_sequence = torch.cat([peer[0] for peer in everyone])
            key_position = torch.cat([peer[1] for peer in everyone])
            key, value = (self.gather(shard).flatten(0, 1) for shard in (key, value))
        visible = (sequence[:, None] == key_sequence) & (position[:, None] >= key_position)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * self.scale
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value).reshape(query.shape[0], -1)

    def gather(self, shard: torch.Tensor) -> torch.Tensor:
        """Apart from ``forward`` so that a test can break it and see the comparison of layouts fail."""
        return GatherFromContextParallel.apply(shard, self.cp_group)  # type: ignore[no-any-return, no-untyped-call]


class RMSNorm(torch.nn.Module):
    """Megatron-Core's torch norm refuses sequence parallelism; all it lacks is the tag that gradient sync looks for."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_rest: Any) -> None:
        super().__init__()
        self.eps = eps
        weight = torch.nn.Parameter(torch.ones(hidden_size))
        weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


def get_spec(args: Any, config: Any, vp_stage: int | None = None) -> Any:
    """The block that slime's ``--spec`` names: local layers with the attention and norm of this module."""
    layer = get_gpt_layer_local_spec(
        normalization=config.normalization,
        qk_layernorm=args.qk_layernorm,
        num_experts=args.num_experts,
        moe_grouped_gemm=args.moe_grouped_gemm,
    )
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)
