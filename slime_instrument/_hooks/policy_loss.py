"""Policy loss: log-probs are taken where they appear, and only inside the policy loss.

The per-sample list never leaves ``policy_loss_function``. It comes from ``get_log_probs_and_entropy``, which the ref,
teacher and old-actor passes call too; so the loss is marked while it runs, and the function's result is looked at
only then. A recomputed loss (activation checkpointing) comes a second time; the first value is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_instrument._capture import capturing, enter_policy_loss, leave_policy_loss, policy_batch
from slime_instrument._patching.declaration import Advice, Call, Patch, Target

MODULE = "slime.backends.megatron_utils.loss"


def mark_policy_loss(call: Call) -> Advice | None:
    if capturing() is None:
        return None
    token = enter_policy_loss(call["batch"])
    return Advice(cleanup=lambda: leave_policy_loss(token))


def take_log_probs(_call: Call) -> Advice | None:
    session, batch = capturing(), policy_batch()
    if session is None or batch is None:
        return None
    positions = batch.get(session.key)
    if positions is None:
        return None

    def take(result: Any) -> Any:
        session.capture(positions, per_sample(result))
        return result

    return Advice(after=take)


def per_sample(result: Any) -> Sequence[Any]:
    """The list of per-sample log-probs: the result is a dict up to v0.2.2, ``(tensor, dict)`` since v0.2.3."""
    found = result if isinstance(result, dict) else result[1]
    log_probs: Sequence[Any] = found["log_probs"]
    return log_probs


def native_capture(module: Any) -> str | None:
    """slime since #2266 captures by itself; its values are the ones that its own dump holds."""
    if hasattr(module, "enable_log_prob_capture"):
        return "slime captures these log-probs itself since #2266"
    return None


PATCHES = (
    Patch(
        name="policy-loss",
        group="capture",
        needs=("dump",),
        targets=(Target(MODULE, "policy_loss_function"),),
        relies_on=("args", "batch", "logits", "sum_of_sample_mean"),
        before=mark_policy_loss,
        lost="The log-probs of this micro-batch are lost, and with them this rollout's train dump.",
        idle=lambda: capturing() is None,
        unneeded=native_capture,
    ),
    Patch(
        name="log-probs",
        group="capture",
        needs=("dump",),
        targets=(Target(MODULE, "get_log_probs_and_entropy"),),
        relies_on=("logits", "unconcat_tokens", "total_lengths", "response_lengths"),
        before=take_log_probs,
        lost="The log-probs of this micro-batch are lost, and with them this rollout's train dump.",
        idle=lambda: policy_batch() is None,
        unneeded=native_capture,
    ),
)
