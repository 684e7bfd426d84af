"""A driver like slime's ``train.py``: Ray, a ``RayTrainGroup``, one rollout. Prints one JSON document at the end.

    python job.py '{"out": DIR, "slime": DIR or null, "cp": 2, ...}'

Ray is the cluster at ``address``, that of the submission, or one for this run alone; options as in ``test_ray.py``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
DEFAULTS: dict[str, Any] = {
    "slime": None, "tp": 1, "cp": 1, "driver_import": False, "job_env": {}, "train_env": {}, "off_rank": None,
    "setup_hook": None, "importable": None, "dump_name": "{rollout_id}.pt",
    "address": None, "submitted": False,
}  # fmt: skip
COMMON = {
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "WANDB_MODE": "disabled",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_DEDUP_LOGS": "0",
}


def prepare_driver(options: dict[str, Any], root: Path, stubs: Path) -> Any:
    """Import slime on the CPU; returns its module of the train group."""
    sys.path[:0] = [str(root), str(stubs)]
    from slime_instrument.lab import _cpu, _sglang

    _cpu.install()
    if options["slime"]:
        _sglang.install()
    else:
        import slime.ray

        slime.ray.__path__.append(str(HERE / "miniature_ray"))
    import slime.backends.megatron_utils.actor
    import slime.ray.actor_group as actor_group

    _cpu.after_megatron_import()
    return actor_group


def switch_off(rank: int) -> None:
    """Give the actor of this rank ``SLIME_INSTRUMENT=0``, below slime: its group treats all ranks alike."""
    import ray

    original = ray.actor.ActorClass.options
    made = iter(range(10**6))

    def options(self: Any, **given: Any) -> Any:
        if self.__ray_metadata__.class_name.endswith("MegatronTrainRayActor") and next(made) == rank:
            environment = (given.get("runtime_env") or self._default_options.get("runtime_env") or {})["env_vars"]
            given["runtime_env"] = {"env_vars": {**environment, "SLIME_INSTRUMENT": "0"}}
        return original(self, **given)

    ray.actor.ActorClass.options = options


def same_weights(self: Any) -> None:
    """In the worker: the weights of the lab, so that a run can be held against one of the lab's."""
    import slime.backends.megatron_utils.actor as module

    from slime_instrument.lab import _weights

    _weights.set_by_name(module, self.args, self, "actor")


def look(self: Any) -> dict[str, Any]:
    """In the worker: whether it is armed, and its calls."""
    import slime.backends.megatron_utils.actor as module

    import slime_instrument

    status = slime_instrument.status()
    return {
        "armed": status.armed,
        "route": status.route,
        "settings": status.settings,
        "patches": {patch.name: [patch.state, patch.calls, patch.reason] for patch in status},
        "wrapped": hasattr(module.MegatronTrainRayActor.train_actor, "__wrapped__"),
        "log": Path(os.environ["LAB_LOGS"], f"{os.getpid()}.log").read_text().splitlines(),
    }


def main() -> None:
    options = {**DEFAULTS, **json.loads(sys.argv[1])}
    os.environ.update(COMMON)
    if options["driver_import"]:
        import slime_instrument  # noqa: F401
    from slime_instrument.lab import _sources

    stubs = _sources.MINIATURE.parent / "stubs"
    root = Path(options["slime"] or _sources.MINIATURE)
    actor_group = prepare_driver(options, root, stubs)
    import ray

    from slime_instrument.lab import _samples
    from slime_instrument.lab._arguments import make_args

    out = Path(options["out"])
    (out / "logs").mkdir(parents=True, exist_ok=True)
    (out / "iter_0000000").mkdir()
    (out / "iter_0000000" / "latest_checkpointed_iteration.txt").touch()
    world = options["tp"] * options["cp"]
    places = [HERE / "worker_site", root, stubs, options["importable"]]
    environment = {
        **COMMON,
        "LAB_LOGS": str(out / "logs"),
        "LAB_STUBS": str(stubs),
        "LAB_REAL": "1" if options["slime"] else "",
        # As slime's launch scripts do: PYTHONPATH is theirs, whatever it was before.
        "PYTHONPATH": os.pathsep.join(str(place) for place in places if place),
        **options["job_env"],
    }
    runtime_env: dict[str, Any] = {"env_vars": environment}
    if options["setup_hook"]:
        runtime_env["worker_process_setup_hook"] = options["setup_hook"]
    if options["submitted"]:
        # As slime's train.py: the cluster is there, and the environment is that of the submission.
        ray.init(logging_level="ERROR", log_to_driver=False)
    elif options["address"]:
        ray.init(address=options["address"], logging_level="ERROR", log_to_driver=False, runtime_env=runtime_env)
    else:
        ray.init(
            address="local", num_cpus=world, num_gpus=world, include_dashboard=False, logging_level="ERROR",
            log_to_driver=False, runtime_env=runtime_env,
        )  # fmt: skip
    began = time.monotonic()
    try:
        if options["off_rank"] is not None:
            switch_off(options["off_rank"])
        args = make_args(
            tp=options["tp"], pp=1, cp=options["cp"], world=world, load=str(out / "iter_0000000"),
            ref_load=None, hf_checkpoint=str(out), train_env_vars=dict(options["train_env"]), release_train=False,
            save_debug_train_data=str(out / "train_data" / options["dump_name"]),
        )  # fmt: skip
        placed = None
        if options["slime"]:
            from slime.ray.placement_group import _create_placement_group

            placed = _create_placement_group(world)
        group = actor_group.RayTrainGroup(args, 1, world, placed, num_gpus_per_actor=0.4, role="actor", with_ref=False)
        group.create()
        actors = group._actor_handlers
        ray.get([actor.__ray_call__.remote(same_weights) for actor in actors])
        ready = time.monotonic()
        parallel = {"dp_size": 1, "cp_size": options["cp"], "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        made = _samples.make_samples(args, "default", 0)
        ray.get(group.async_train(0, _samples.split_for_training(args, parallel, made, 0)))
        trained = time.monotonic()
        workers = ray.get([actor.__ray_call__.remote(look) for actor in actors])
    finally:
        ray.shutdown()
    document = {
        "workers": workers,
        "train_dumps": sorted(path.name for path in (out / "train_data").glob("*.pt")),
        "train_env_vars": args.train_env_vars,
        "create_s": ready - began,
        "train_s": trained - ready,
        "driver_armed": "slime_instrument._runtime" in sys.modules and look_at_driver(),
    }
    print("\n" + json.dumps(document))


def look_at_driver() -> bool:
    import slime_instrument

    return bool(slime_instrument.status().armed)


if __name__ == "__main__":
    main()
