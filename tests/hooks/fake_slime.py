"""A small package with slime's module paths and habits, in the forms that its releases had."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

TIMER = """
    class Timer:
        _it = None
        def __new__(cls):
            if cls._it is None:
                cls._it = super().__new__(cls)
            return cls._it
"""

# The whole batch's lengths are cut to the local samples; partition is dropped (v0.2.1), kept (#2266), unknown (v0.2.0).
DATA_LOADER = """
    import ray
    from slime.utils.timer import Timer

    def process_rollout_data(args, rollout_data_ref, dp_rank, dp_size):
        rollout_data = ray.get(rollout_data_ref[dp_rank])
        partition = rollout_data["partition"] if {keep} else rollout_data.pop("partition")
        Timer().seq_lens = rollout_data["total_lengths"]
        rollout_data["total_lengths"] = [rollout_data["total_lengths"][i] for i in partition]
        return rollout_data
"""
DATA_LOADER_V020 = """
    import ray
    from slime.utils.timer import Timer

    def get_seqlen_balanced_partitions(lengths, k, equal_size):
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        return [sorted(order[rank::k]) for rank in range(k)]

    def process_rollout_data(args, rollout_data_ref, dp_rank, dp_size):
        whole = ray.get(rollout_data_ref)
        lengths = Timer().seq_lens = whole["total_lengths"]
        if args.balance_data:
            n = args.n_samples_per_prompt
            groups = [sum(lengths[i : i + n]) for i in range(0, len(lengths), n)]
            mine = get_seqlen_balanced_partitions(groups, dp_size, equal_size=True)[dp_rank]
            partition = [group * n + i for group in mine for i in range(n)]
        else:
            partition = range(dp_rank, len(lengths), dp_size)
        return {key: [value[i] for i in partition] for key, value in whole.items()}
"""
ITERATOR = """
    LOGGED = []

    class DataIterator:
        def __init__(self, rollout_data, micro_batch_size=None, micro_batch_indices=None):
            self.rollout_data = rollout_data
            self.micro_batch_size = micro_batch_size
            self.micro_batch_indices = micro_batch_indices
            self.offset = 0

        def get_next(self, keys):
            batch = {}
            for key in keys:
                values = self.rollout_data.get(key)
                if values is None:
                    batch[key] = None
                elif self.micro_batch_indices is not None:
                    batch[key] = [values[i] for i in self.micro_batch_indices[self.offset]]
                else:
                    batch[key] = values[self.offset : self.offset + self.micro_batch_size]
            self.offset += 1 if self.micro_batch_indices is not None else self.micro_batch_size
            return batch

    def log_rollout_data(rollout_id, args, rollout_data):
        if getattr(args, "logging_fails", False):
            raise OSError("wandb is down")
        LOGGED.append(sorted(rollout_data))
        rollout_data["entropy_of_log"] = [0.5] * len(rollout_data["response_lengths"])
"""
LOSS = """
    import torch

    def get_log_probs_and_entropy(logits, *, args=None, unconcat_tokens, total_lengths, response_lengths, **more):
        log_probs = [logits * t[-r:] if r else logits * t[:0] for t, r in zip(unconcat_tokens, response_lengths)]
        found = {"log_probs": log_probs}
        return found if FORM == "dict" else (torch.empty(0), found)

    def policy_loss_function(args, batch, logits, sum_of_sample_mean):
        found = get_log_probs_and_entropy(
            logits, args=args, unconcat_tokens=batch["unconcat_tokens"],
            total_lengths=batch["total_lengths"], response_lengths=batch["response_lengths"],
        )
        log_probs = (found if FORM == "dict" else found[1])["log_probs"]
        SEEN.append(sorted(batch))
        if args.fail_in_loss is not None and len(SEEN) == args.fail_in_loss:
            raise FloatingPointError("the loss is nan")
        return sum_of_sample_mean(torch.cat(log_probs))

    SEEN = []
"""
NATIVE_CAPTURE = """
    CAPTURED = []
    def enable_log_prob_capture(on=True): pass
    def drain_captured_log_probs():
        drained, CAPTURED[:] = list(CAPTURED), []
        return drained
"""
MODEL = """
    from slime.backends.megatron_utils.data import DataIterator
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, policy_loss_function

    KEYS = ["unconcat_tokens", "total_lengths", "response_lengths"]

    def forward_only(args, weight, data_iterator, steps):
        for _ in range(steps):
            batch = data_iterator.get_next(KEYS)
            get_log_probs_and_entropy(weight * 100, args=args, **batch)

    def train_one_step(args, rollout_id, step_id, data_iterator, weight, num_microbatches):
        batches = []
        for _ in range(num_microbatches):  # a pipeline schedule: forwards come before the losses
            batches.append(data_iterator.get_next(KEYS))
        for batch in batches:
            for _ in range(2 if args.recompute else 1):
                policy_loss_function(args, batch, weight * (step_id + 1), lambda x: x.sum()).backward()
"""
ACTOR = """
    import torch
    from slime.backends.megatron_utils.data import DataIterator, log_rollout_data
    from slime.backends.megatron_utils.model import forward_only, train_one_step
    from {dump_home} import save_debug_train_data
    from slime.utils.data import process_rollout_data

    class TrainRayActor:
        def init(self, args, role, with_ref=False):
            self.args = args
            return args.start_rollout_id

    class MegatronTrainRayActor(TrainRayActor):
        def init(self, args, role, with_ref=False):
            super().init(args, role, with_ref)
            self.weight = torch.ones((), requires_grad=True)
            return args.start_rollout_id

        def train(self, rollout_id, rollout_data_ref):
            rollout_data = process_rollout_data(self.args, rollout_data_ref, 0, self.args.dp_size)
            log_rollout_data(rollout_id, self.args, rollout_data)
            return self.train_actor(rollout_id, rollout_data)

        def train_actor(self, rollout_id, rollout_data):
            count = len(rollout_data["response_lengths"])
            forward_only(self.args, self.weight, DataIterator(rollout_data, 1), count)
            if self.args.compute_log_probs:
                rollout_data["log_probs"] = [torch.full((r,), -7.0) for r in rollout_data["response_lengths"]]
            for step_id in range(self.args.steps):
                if self.args.indexed:
                    iterator = DataIterator(rollout_data, None, [[i] for i in reversed(range(count))])
                else:
                    iterator = DataIterator(rollout_data, 1)
                train_one_step(self.args, rollout_id, step_id, iterator, self.weight, count)
            save_debug_train_data(self.args, rollout_id=rollout_id, rollout_data=rollout_data)
            if self.args.fail_at_end:
                raise ConnectionError("weight update failed")
            return "trained"
"""
DUMP = """
    NATIVE = []
    def save_debug_train_data(args, *, rollout_id, rollout_data):
        NATIVE.append((rollout_id, dict(rollout_data)))
"""


@dataclass(frozen=True)
class Form:
    """How the made slime looks: the release's form of each thing that changed over time."""

    loader: str = "pops"  # "pops" (v0.2.1), "keeps" (#2266), "v020"
    log_probs: str = "tuple"  # "dict" up to v0.2.2
    dump_home: str = "slime.utils.train_dump_utils"
    native_capture: bool = False


PLAIN = Form()


class FakeSlime:
    """Write it, import it, look into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, form: Form, **replaced: str) -> None:
        """``replaced``: module name with ``__`` for dots -> another source."""
        loader = (
            DATA_LOADER_V020 if form.loader == "v020" else DATA_LOADER.replace("{keep}", str(form.loader == "keeps"))
        )
        loss = f"FORM = {form.log_probs!r}\n" + textwrap.dedent(LOSS)
        sources = {
            "slime.utils.timer": TIMER,
            "slime.utils.data": loader,
            "slime.backends.megatron_utils.data": ITERATOR,
            "slime.backends.megatron_utils.loss": loss
            + (textwrap.dedent(NATIVE_CAPTURE) if form.native_capture else ""),
            "slime.backends.megatron_utils.model": MODEL,
            "slime.backends.megatron_utils.actor": ACTOR.replace("{dump_home}", form.dump_home),
            form.dump_home: DUMP,
        }
        sources.update({name.replace("__", "."): source for name, source in replaced.items()})
        for name, source in sources.items():
            path = self.folder.joinpath(*name.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()

    def __getattr__(self, name: str) -> ModuleType:
        """``fake.loss``, ``fake.data``: the module under ``slime.backends.megatron_utils``, imported."""
        return importlib.import_module(f"slime.backends.megatron_utils.{name}")

    @staticmethod
    def loader() -> ModuleType:
        return importlib.import_module("slime.utils.data")

    @staticmethod
    def dump(home: str = "slime.utils.train_dump_utils") -> Any:
        return importlib.import_module(home)

    @staticmethod
    def modules() -> list[str]:
        return [name for name in sys.modules if name == "slime" or name.startswith("slime.")]


Make = Callable[..., FakeSlime]
