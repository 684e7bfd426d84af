"""The training actor."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core import mpu

from slime.ray.train_actor import TrainRayActor
from slime.utils import train_dump_utils
from slime.utils.data import process_rollout_data
from slime.utils.misc import Box
from slime.utils.types import RolloutBatch

from .cp_utils import slice_log_prob_with_cp
from .data import DataIterator, get_data_iterator, log_rollout_data
from .initialize import init
from .loss import compute_advantages_and_returns, get_log_probs_and_entropy
from .model import forward_only, train
from .model_provider import initialize_model_and_optimizer
from .update_weight.common import named_params_and_buffers


class WeightsBackuper:
    """Copies of all parameters under a tag: the actor's, and those of models that share its modules."""

    def __init__(self, source: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self._source = source
        self._copies: dict[str, dict[str, torch.Tensor]] = {}

    @property
    def backup_tags(self) -> list[str]:
        return list(self._copies)

    @torch.no_grad()
    def backup(self, tag: str) -> None:
        self._copies[tag] = {name: parameter.detach().clone() for name, parameter in self._source()}

    @torch.no_grad()
    def restore(self, tag: str) -> None:
        for name, parameter in self._source():
            parameter.copy_(self._copies[tag][name])


class MegatronTrainRayActor(TrainRayActor):  # type: ignore[misc]
    def init(self, args: Namespace, role: str, with_ref: bool = False, with_opd_teacher: bool = False) -> int | None:
        super().init(args, role, with_ref, with_opd_teacher)
        init(args)
        self.model, self.optimizer = initialize_model_and_optimizer(args)
        self.opt_param_scheduler = None
        self.train_parallel_config = {
            "dp_size": mpu.get_data_parallel_world_size(with_context_parallel=False),
            "cp_size": mpu.get_context_parallel_world_size(),
            "vpp_size": mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
            "microbatch_group_size_per_vp_stage": 1,
        }
        self.weights_backuper = WeightsBackuper(lambda: named_params_and_buffers(args, self.model))
        self.weights_backuper.backup("actor")
        if with_ref:
            self.weights_backuper.backup("ref")
        self._active_model_tag = "ref" if with_ref else "actor"
        return 0

    def _get_rollout_data(self, rollout_data_ref: list[Box]) -> RolloutBatch:
        rollout_data: RolloutBatch = process_rollout_data(
            self.args,
            rollout_data_ref,
            mpu.get_data_parallel_rank(with_context_parallel=False),
            mpu.get_data_parallel_world_size(with_context_parallel=False),
        )
        device = torch.cuda.current_device()
        for key, dtype in (("tokens", torch.long), ("loss_masks", torch.int)):
            rollout_data[key] = [value.to(device=device, dtype=dtype) for value in rollout_data[key]]
        rollout_data["rollout_mask_sums"] = rollout_data["rollout_mask_sums"].to(device=device)
        if "rollout_log_probs" in rollout_data:
            rollout_data["rollout_log_probs"] = [
                slice_log_prob_with_cp(log_prob, total, response).to(device=device)
                for log_prob, total, response in zip(
                    rollout_data["rollout_log_probs"],
                    rollout_data["total_lengths"],
                    rollout_data["response_lengths"],
                    strict=True,
                )
            ]
        return rollout_data

    def _switch_model(self, tag: str) -> None:
        self.weights_backuper.restore(tag)
        self._active_model_tag = tag

    def compute_log_prob(
        self, data_iterator: list[DataIterator], num_microbatches: list[int], store_prefix: str = ""
    ) -> dict[str, list[torch.Tensor]]:
        return forward_only(
            get_log_probs_and_entropy,
            self.args,
            self.model,
            data_iterator,
            num_microbatches,
            store_prefix=store_prefix,
        )

    def train(self, rollout_id: int, rollout_data_ref: list[Box], external_data: Any = None) -> None:
        rollout_data = self._get_rollout_data(rollout_data_ref)
        self.train_actor(rollout_id, rollout_data, external_data=external_data)

    def train_actor(self, rollout_id: int, rollout_data: RolloutBatch, external_data: Any = None) -> None:
        args = self.args
        data_iterator = get_data_iterator(rollout_data)
        num_microbatches = rollout_data["num_microbatches"]
        global_batch_sizes = rollout_data["global_batch_sizes"]
        if args.compute_advantages_and_returns:
            if "ref" in self.weights_backuper.backup_tags:
                self._switch_model("ref")
                rollout_data.update(self.compute_log_prob(data_iterator, num_microbatches, store_prefix="ref_"))
            if self._active_model_tag != "actor":
                self._switch_model("actor")
            # After one optimizer step only, the old log-probs are those that the loss computes anyway.
            reused = len(num_microbatches) == 1 and args.loss_type == "policy_loss" and args.kl_coef == 0
            if not args.use_rollout_logprobs and not reused:
                rollout_data.update(self.compute_log_prob(data_iterator, num_microbatches))
            compute_advantages_and_returns(args, rollout_data)
        elif self._active_model_tag != "actor":
            self._switch_model("actor")
        log_rollout_data(rollout_id, args, rollout_data)
        train(
            rollout_id,
            self.model,
            self.optimizer,
            self.opt_param_scheduler,
            data_iterator,
            num_microbatches,
            global_batch_sizes,
        )
        train_dump_utils.save_debug_train_data(args, rollout_id=rollout_id, rollout_data=rollout_data)
        self.weights_backuper.backup("actor")
