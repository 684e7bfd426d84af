"""What slime's train group is to slime, for the miniature: one Ray actor per rank, with ``args.train_env_vars``."""

from __future__ import annotations

import socket
from argparse import Namespace
from typing import Any

import ray


class RayTrainGroup:
    def __init__(self, args: Namespace, num_nodes: int, num_gpus_per_node: int, pg: Any, **kwargs: Any) -> None:
        self.args, self.kwargs, self.world, self._pg = args, kwargs, num_nodes * num_gpus_per_node, pg
        self._actor_handlers: list[Any] = []

    def create(self) -> list[Any]:
        self._allocate_gpus_for_actor(self._pg, self.kwargs["num_gpus_per_actor"])
        initialised = [a.init.remote(self.args, self.kwargs["role"]) for a in self._actor_handlers]
        return list(ray.get(initialised))

    def _allocate_gpus_for_actor(self, pg: Any, num_gpus_per_actor: float) -> None:
        from slime.backends.megatron_utils.actor import MegatronTrainRayActor

        environment = {"NCCL_CUMEM_ENABLE": "0", **self.args.train_env_vars}
        actor_class = ray.remote(num_gpus=num_gpus_per_actor, runtime_env={"env_vars": environment})(
            MegatronTrainRayActor
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        for rank in range(self.world):
            mine = {"RANK": str(rank), "WORLD_SIZE": str(self.world), "LOCAL_RANK": "0"}
            runtime_env = {"env_vars": {**environment, **mine, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}}
            self._actor_handlers.append(actor_class.options(runtime_env=runtime_env).remote(self.world, rank))

    def async_train(self, rollout_id: int, rollout_data_ref: Any) -> list[Any]:
        return [actor.train.remote(rollout_id, rollout_data_ref) for actor in self._actor_handlers]
