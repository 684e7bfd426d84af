"""The places in slime where this package works, in the order in which a rollout passes them.

A hook reads as one function (see ``_patching.patch``); what they all share is the ``Process`` of ``capture`` that each
call brings along. Nothing here talks to other ranks or writes files: that is ``_dump``.
"""

from __future__ import annotations

from slime_instrument._hooks.dump import save_debug_train_data
from slime_instrument._hooks.loading import keep_positions
from slime_instrument._hooks.start import carry_settings, check_run
from slime_instrument._hooks.training import (
    ask_for_positions,
    hide_positions,
    mark_policy_loss,
    note_step,
    take_log_probs,
    train_actor,
)
from slime_instrument._patching.patch import Patch

HOOKS: tuple[Patch, ...] = (
    carry_settings,  # in the driver
    check_run,  # in each trainer, once
    keep_positions,  # and in each rollout: its data are loaded,
    train_actor,  # the trainer begins,
    hide_positions,  # slime logs what it got,
    note_step,  # each optimizer step
    ask_for_positions,  # takes micro-batches,
    mark_policy_loss,  # whose loss
    take_log_probs,  # computes log-probs;
    save_debug_train_data,  # and the rollout is dumped.
)
