"""One rank: builds the actor, trains the rollouts, and answers with what it saw."""

from __future__ import annotations

import faulthandler
import functools
import importlib
import inspect
import logging
import os
import sys
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu

from slime_instrument.lab import _extras, _releases, _weights
from slime_instrument.lab import _samples as sample_sets
from slime_instrument.lab._arguments import make_args, model_arguments
from slime_instrument.lab._checkpoint import Checkpoint
from slime_instrument.lab._faults import StandingStill, parse_fault, shift_masks, swap_rollout_log_probs
from slime_instrument.lab._options import LabOptions
from slime_instrument.lab._rollout import Rollout
from slime_instrument.lab._target import load_file


def rank_main(options: LabOptions, actor_module: Any, rank: int, port: int, answers: Connection) -> None:
    """Runs in the forked process; sends ``("progress"|"result"|"failed", value)``."""
    # A rank that hangs in a collective cannot be asked: just before the deadline it is made to say where, and to end.
    hung = options.out / f"hung_{rank}.txt"
    with open(hung, "w") as stack:
        faulthandler.dump_traceback_later(max(0.5, options.timeout - 1.0), exit=True, file=stack)
        try:
            _train(options, actor_module, rank, port, answers)
        except BaseException:
            answers.send(("failed", traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
    hung.unlink()
    answers.close()
    sys.stdout.flush()
    sys.stderr.flush()


def _train(options: LabOptions, actor_module: Any, rank: int, port: int, answers: Connection) -> None:
    logging.basicConfig(level=logging.WARNING)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(options.world),
        LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    # slime checks that there is a checkpoint before it asks Megatron-LM, here a stub, to load it.
    checkpoint_of(options).mkdir(parents=True, exist_ok=True)
    (checkpoint_of(options) / "latest_checkpointed_iteration.txt").touch()
    checkpoint = Checkpoint.read(options.checkpoint) if options.checkpoint else None
    rollouts = [Rollout.read(path) for path in options.rollout_files]
    args = _arguments(options, checkpoint, rollouts)
    # The actor asks for these files although nothing in them is used.
    for name, stub in (("AutoConfig", Namespace(vocab_size=args.vocab_size)), ("AutoTokenizer", None)):
        if hasattr(actor_module, name):
            getattr(actor_module, name).from_pretrained = staticmethod(lambda *_, _stub=stub, **__: _stub)
    _extras.prepare(actor_module, options.extras)
    if options.rank_hook:
        file, _, function = options.rank_hook.rpartition(":")
        getattr(load_file(Path(file), "lab_rank_hook"), function)(rank, actor_module, args)
    logged = _capture_tracking()
    custom_calls = _count_custom_calls(options)
    fault = parse_fault(options.fault)
    standing_still: StandingStill | None = None

    started = time.monotonic()
    # __init__ asks Ray for the GPUs that it was given.
    actor = object.__new__(actor_module.MegatronTrainRayActor)
    actor._world_size, actor._rank = options.world, rank
    actor.init(args, "actor", with_ref=options.with_ref)
    for tag in ("ref", "actor") if options.with_ref else ("actor",):
        if checkpoint is not None:
            _weights.load(checkpoint, actor_module, args, actor, tag)
        else:
            # The reference has weights of its own, so that log-probs taken from the wrong model show.
            _weights.set_by_name(actor_module, args, actor, tag)
    parallel = {**getattr(actor, "train_parallel_config", {}), "dp_size": options.dp}
    known = torch.load(options.rollout_log_probs, weights_only=True) if options.rollout_log_probs else None
    # Where log-probs and losses are, so where the tracker is called and the patches see their calls.
    reports = (
        mpu.is_pipeline_last_stage(ignore_virtual=True)
        and mpu.get_tensor_model_parallel_rank() == 0
        and mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    )
    ready = time.monotonic()
    for number in range(options.rollouts):
        if rollouts:
            rollout_id, samples = rollouts[number].rollout_id, rollouts[number].of_target()
        else:
            rollout_id = number
            samples = sample_sets.make_samples(
                args,
                options.samples,
                rollout_id,
                known and known[rollout_id],
                extra=options.extras,
                # Releases that count a batch in samples cut the rollout before they dump it.
                keep_dropped=_releases.batches_count_rollouts(),
                two_of_one_length=fault is not None and fault.name == "sample-swap",
            )
        if fault and fault.name == "sample-swap" and rollout_id >= fault.value:
            swap_rollout_log_probs(samples)
        if rank == 0:
            sample_sets.save_rollout_dump(args, samples, rollout_id)
        if fault and fault.name == "mask-shift" and rollout_id >= fault.value:
            shift_masks(samples)
        if fault and fault.name == "stale-weights" and rollout_id == fault.value - 1:
            standing_still = StandingStill(lambda: _weights.named(actor_module, args, actor))
        elif standing_still is not None:
            standing_still.restore()
            _weights.changed(args, actor, "actor")
        boxes = sample_sets.split_for_training(args, parallel, samples, rollout_id)
        dp_rank = mpu.get_data_parallel_rank(with_context_parallel=False)
        actor.train(rollout_id, boxes, **_extras.external_data(actor, boxes, options.extras, dp_rank))
        if reports:
            answers.send(("progress", f"rollout {number + 1} of {options.rollouts} trained"))
    trained = time.monotonic()
    if options.save_weights:
        _weights.save(actor_module, args, actor, options.out / "weights" / f"{rank}.pt")
    if options.export_checkpoint and checkpoint is not None:
        _weights.export(checkpoint, actor_module, args, actor, options.export_checkpoint)
    torch.distributed.barrier()
    answers.send(
        (
            "result",
            {
                "reports": reports,
                "init_s": ready - started,
                "train_s": trained - ready,
                "patches": _patches() if reports and options.instrumented else [],
                "logged_metrics": logged if reports else [],
                "custom_calls": custom_calls,
            },
        )
    )
    torch.distributed.destroy_process_group()


def checkpoint_of(options: LabOptions) -> Path:
    """Where the ranks of a run make it; removed after the run."""
    return options.out / "iter_0000000"


def _arguments(options: LabOptions, checkpoint: Checkpoint | None, rollouts: Sequence[Rollout]) -> Namespace:
    out = options.out
    fault = parse_fault(options.fault)
    hot = {"rollout_temperature": fault.value} if fault and fault.name == "temperature" else {}
    args = make_args(
        tp=options.tp,
        pp=options.pp,
        cp=options.cp,
        world=options.world,
        load=str(checkpoint_of(options)),
        ref_load=str(checkpoint_of(options)),
        hf_checkpoint=str(out / "hf"),
        num_rollout=options.rollouts,
        **{**model_arguments(checkpoint), **hot, **options.overrides},
    )
    name = options.dump_name or ("{rollout_id}.pt" if _one_dump_per_rollout(options) else "{rollout_id}_{rank}.pt")
    args.save_debug_train_data = str(out / "train_data" / name)
    args.save_debug_rollout_data = str(out / "rollout_data" / "{rollout_id}.pt")
    in_rollouts = _releases.batches_count_rollouts()
    if rollouts:
        # The preconditions have seen that all rollouts have one size.
        first = rollouts[0]
        args.log_passrate = first.group_size is not None
        args.n_samples_per_prompt = first.group_size or first.n_samples
        args.rollout_batch_size = first.n_samples // args.n_samples_per_prompt
        args.global_batch_size = (first.n_rollouts if in_rollouts else first.n_samples) // options.steps
        return args
    count = args.rollout_batch_size * args.n_samples_per_prompt
    if options.samples != "default":
        # Pass rates want whole groups of samples, which fan-out does not give them.
        args.log_passrate = False
        in_samples = sample_sets.batch_size(options.samples, count, in_rollouts=False)
        args.rollout_batch_size = in_samples // args.n_samples_per_prompt
    args.global_batch_size = sample_sets.batch_size(options.samples, count, in_rollouts=in_rollouts) // options.steps
    return args


def _one_dump_per_rollout(options: LabOptions) -> bool:
    native = options.slime is not None and not (options.slime / "slime" / "utils" / "train_dump_utils.py").exists()
    return options.instrumented or native


def _count_custom_calls(options: LabOptions) -> dict[str, int]:
    """Calls in this process, by override, of each custom function that one names. Counted until the process ends."""
    calls: dict[str, int] = {}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def count(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return function(*args, **kwargs)

        return count

    for name, path in options.custom_functions.items():
        module_name, _, attribute = path.rpartition(".")
        module = importlib.import_module(module_name)
        function = getattr(module, attribute)
        if inspect.isroutine(function):
            calls[name] = 0
            setattr(module, attribute, counted(name, function))
    return calls


def _capture_tracking() -> list[dict[str, Any]]:
    """Record what is handed to the experiment tracker, by whichever of its names this release has."""
    logged: list[dict[str, Any]] = []

    def record(_args: Any, metrics: dict[str, Any], step_key: str) -> None:
        logged.append({key: _plain(value) for key, value in metrics.items()})

    for name in ("slime.utils.logging_utils", "slime.utils.tracking_utils", "slime.observability.logging_utils"):
        module = sys.modules.get(name)
        if module is not None and hasattr(module, "log"):
            module.__dict__["log"] = record
    return logged


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _patches() -> list[dict[str, Any]]:
    import slime_instrument

    status = getattr(slime_instrument, "status", None)
    return [dict(record.as_dict()) for record in status()] if status else []
