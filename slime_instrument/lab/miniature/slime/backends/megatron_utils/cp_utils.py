"""Context parallelism in zigzag: a sequence is cut into 2·cp equal chunks, and rank r owns number r and 2·cp-1-r."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from megatron.core import mpu


def owned_positions(total_length: int) -> torch.Tensor:
    """Positions in the sequence (and in the padding that makes its chunks equal) that this rank owns, in its order."""
    size, rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
    if size == 1:
        return torch.arange(total_length)
    chunk = -(-total_length // (2 * size))
    return torch.arange(2 * size * chunk).reshape(2 * size, chunk)[[rank, 2 * size - 1 - rank]].flatten()


def response_slots(total_length: int, response_length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For each response token that this rank owns: the local slot whose logits predict it, and its place in the
    response. A token is owned by whoever owns the token before it."""
    predicted = owned_positions(total_length) + 1
    prompt_length = total_length - response_length
    slots = ((predicted >= prompt_length) & (predicted < total_length)).nonzero().flatten()
    return slots, predicted[slots] - prompt_length


def slice_with_cp(tokens: torch.Tensor, pad_value: float) -> torch.Tensor:
    owned = owned_positions(tokens.size(0))
    padding = max(0, int(owned.max()) + 1 - tokens.size(0)) if owned.numel() else 0
    return F.pad(tokens, (0, padding), value=pad_value)[owned]


def slice_log_prob_with_cp(log_prob: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    """This rank's part of a value per response token."""
    return log_prob[response_slots(total_length, response_length)[1]]


def get_sum_of_sample_mean(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[torch.Tensor],
    sample_denoms: Sequence[torch.Tensor],
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Reduce a value per owned response token to the sum, over samples, of their masked means.

    The denominators are those of whole rollouts, so the parts of all ranks and micro-batches simply add up.
    """
    masks = [
        slice_log_prob_with_cp(mask, total, response)
        for mask, total, response in zip(loss_masks, total_lengths, response_lengths, strict=True)
    ]
    sizes = [mask.numel() for mask in masks]

    def sum_of_sample_mean(x: torch.Tensor) -> torch.Tensor:
        result = x.new_zeros(())
        for part, mask, denominator in zip(torch.split(x, sizes), masks, sample_denoms, strict=True):
            result = result + (part * mask).sum() / denominator.clamp(min=1)
        return result

    return sum_of_sample_mean
