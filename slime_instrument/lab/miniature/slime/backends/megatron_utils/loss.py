"""Log-probs, advantages and losses."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import mpu
from torch.utils.checkpoint import checkpoint

from slime.utils.ppo_utils import compute_approx_kl, compute_entropy, compute_log_probs, compute_policy_loss
from slime.utils.types import RolloutBatch

from .cp_utils import get_sum_of_sample_mean, owned_positions, response_slots

Reducer = Callable[[torch.Tensor], torch.Tensor]
Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


def get_log_probs_and_entropy(
    logits: torch.Tensor,
    *,
    args: Namespace,
    unconcat_tokens: list[torch.Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    with_entropy: bool = False,
    non_loss_data: bool = True,
) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
    """Per sample, the log-probs (and entropies) of the response tokens that this rank owns.

    The empty tensor stands where Megatron-Core's schedules expect a loss.
    """
    assert non_loss_data
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.shape[:1] == (1,), logits.shape
    logits = logits.squeeze(0) / args.rollout_temperature
    targets = torch.zeros(logits.size(0), dtype=torch.long, device=logits.device)
    taken = []
    start = 0
    for tokens, total, response in zip(unconcat_tokens, total_lengths, response_lengths, strict=True):
        if total == response > 0 and mpu.get_context_parallel_world_size() == 1:
            # As in slime, which only gets by where ranks cut the sequence: there nobody looks for the first token.
            raise RuntimeError("a response without a prompt has no logits for its first token")
        slots, places = response_slots(total, response)
        targets[start + slots] = tokens[total - response + places]
        taken.append(start + slots)
        start += owned_positions(total).numel()
    log_probs = compute_log_probs(logits, targets)
    result = {"log_probs": [log_probs[slots] for slots in taken]}
    if with_entropy:
        entropy = compute_entropy(logits, mpu.get_tensor_model_parallel_group())
        result["entropy"] = [entropy[slots] for slots in taken]
    return torch.empty(0, device=logits.device), result


def compute_advantages_and_returns(args: Namespace, rollout_data: RolloutBatch) -> None:
    """GRPO: a response's normalised reward, for every token of it. Last pipeline stage only."""
    if not mpu.is_pipeline_last_stage():
        return
    if args.advantage_estimator != "grpo":
        raise NotImplementedError(f"the miniature has GRPO only, not {args.advantage_estimator}")
    log_probs = rollout_data.get("rollout_log_probs" if args.use_rollout_logprobs else "log_probs")
    shaped = log_probs or rollout_data["rollout_log_probs"]
    if args.kl_coef and log_probs:
        pairs = zip(log_probs, rollout_data["ref_log_probs"], strict=True)
        rollout_data["kl"] = [compute_approx_kl(ours, reference) for ours, reference in pairs]
    else:
        rollout_data["kl"] = [torch.zeros_like(one, dtype=torch.float32) for one in shaped]
    rewards = rollout_data["rewards"]
    returns = [torch.full_like(kl, reward) for kl, reward in zip(rollout_data["kl"], rewards, strict=True)]
    rollout_data["returns"] = returns
    rollout_data["advantages"] = list(returns)


def policy_loss_function(
    args: Namespace, batch: RolloutBatch, logits: torch.Tensor, sum_of_sample_mean: Reducer
) -> Loss:
    """Clipped policy gradient. The log-probs of this forward pass are used here and are gone when it returns."""
    advantages = torch.cat(batch["advantages"])
    old_log_probs = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch.get("log_probs")
    _, log_probs_and_entropy = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
    )
    log_probs = log_probs_and_entropy["log_probs"]
    if not old_log_probs:
        old_log_probs = [one.detach() for one in log_probs]
    log_prob, old_log_prob = torch.cat(log_probs), torch.cat(old_log_probs)
    ppo_kl = old_log_prob - log_prob
    pg_loss, clipped = compute_policy_loss(ppo_kl, advantages, args.eps_clip, args.eps_clip_high)
    pg_loss = sum_of_sample_mean(pg_loss)
    loss = pg_loss
    metrics = {
        "pg_loss": pg_loss,
        "entropy_loss": sum_of_sample_mean(torch.cat(log_probs_and_entropy["entropy"])),
        "pg_clipfrac": sum_of_sample_mean(clipped),
        "ppo_kl": sum_of_sample_mean(ppo_kl),
    }
    if args.use_kl_loss:
        metrics["kl_loss"] = sum_of_sample_mean(compute_approx_kl(log_prob, torch.cat(batch["ref_log_probs"])))
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    if batch.get("rollout_log_probs"):
        compared = log_prob if args.use_rollout_logprobs else old_log_prob
        difference = (compared - torch.cat(batch["rollout_log_probs"])).abs()
        metrics["train_rollout_logprob_abs_diff"] = sum_of_sample_mean(difference)
    return _reported(loss, log_prob, logits, metrics)


def sft_loss_function(args: Namespace, batch: RolloutBatch, logits: torch.Tensor, sum_of_sample_mean: Reducer) -> Loss:
    """Negative log-likelihood of the response."""
    _, result = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    log_prob = torch.cat(result["log_probs"])
    return _reported(-sum_of_sample_mean(log_prob), log_prob, logits, {})


def _reported(
    loss: torch.Tensor, log_prob: torch.Tensor, logits: torch.Tensor, metrics: dict[str, torch.Tensor]
) -> Loss:
    if log_prob.numel() == 0:
        # A rank that owns no response token must still walk backwards through the collectives of the others.
        loss = loss + 0 * logits.sum()
    return loss, {name: value.detach().clone() for name, value in {"loss": loss, **metrics}.items()}


def loss_function(
    args: Namespace, batch: RolloutBatch, num_microbatches: int, step_global_batch_size: int, logits: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The configured loss, scaled so that Megatron-Core's averages end up as a mean over the step's rollouts."""
    sum_of_sample_mean = get_sum_of_sample_mean(
        batch["total_lengths"], batch["response_lengths"], batch["loss_masks"], batch["rollout_mask_sums"]
    )
    # Looked up on each call, as slime does, so that what stands in the module counts.
    functions = {"policy_loss": policy_loss_function, "sft_loss": sft_loss_function}
    function = functions[args.loss_type]
    if args.recompute_loss_function:
        loss, metrics = checkpoint(function, args, batch, logits, sum_of_sample_mean, use_reentrant=False)
    else:
        loss, metrics = function(args, batch, logits, sum_of_sample_mean)
    ranks = mpu.get_data_parallel_world_size(with_context_parallel=True)
    scaled = loss * num_microbatches * ranks / step_global_batch_size
    values = torch.stack([value.float() for value in metrics.values()])
    return scaled, torch.tensor(1, device=logits.device), {"keys": list(metrics), "values": values}
