"""A Ray job started the way slime's scripts start it needs one variable and no code."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._validate import validate_files
from slime_instrument.lab import sources

HERE = Path(__file__).parent / "ray_lab"

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("ray", "megatron", "aiohttp")),
        reason="ray[default] or megatron-core is not installed: pip install 'slime-instrument[lab]'",
    ),
]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@pytest.fixture
def own_token() -> dict[str, str]:
    """Authentication for the test's own cluster, whatever the user's Ray has set up: a token that nobody else knows."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


@pytest.fixture
def cluster(installed: Any, own_token: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster of its own, started as a head node with a dashboard, and ended by its process group."""
    port, dashboard = free_ports(2)
    # Ray's sockets live below this folder, and their paths must be short.
    folder = Path("/tmp", f"si-{os.getpid()}")
    log = tmp_path_factory.mktemp("ray") / "head.log"
    with open(log, "wb") as output:
        head = subprocess.Popen(
            [
                installed.python, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
                f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", "--node-ip-address=127.0.0.1",
                "--num-cpus=4", "--num-gpus=2", "--disable-usage-stats", f"--temp-dir={folder}",
            ],
            env=installed.environment([], **own_token), stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        while not reachable(dashboard):
            assert head.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        head.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        subprocess.run(["rm", "-rf", str(folder)], check=False)


def reachable(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_one_variable_in_the_runtime_env_of_ray_job_submit_is_enough(
    cluster: str, own_token: dict[str, str], installed: Any, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    stubs = sources.MINIATURE.parent / "stubs"
    runtime_env = {
        "env_vars": {
            "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "LAB_LOGS": str(tmp_path / "logs"), "LAB_STUBS": str(stubs), "LAB_REAL": "",
            "PYTHONPATH": os.pathsep.join(map(str, [HERE / "worker_site", sources.MINIATURE, stubs])),
            "SLIME_INSTRUMENT": "1",
        }
    }  # fmt: skip
    options = json.dumps({"out": str(tmp_path), "cp": 2, "submitted": True})
    done = installed.run(
        "-m", "ray.scripts.scripts", "job", "submit", f"--address={cluster}",
        f"--runtime-env-json={json.dumps(runtime_env)}", "--", installed.python, HERE / "job.py", options,
        **own_token,
    )  # fmt: skip
    answer = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"workers"')))
    assert answer["driver_armed"] is True
    for worker in answer["workers"]:
        assert worker["armed"] is True
        assert worker["route"].startswith("SLIME_INSTRUMENT in the environment (.pth)")
        assert worker["patches"]["train-actor"][:2] == ["ACTIVE", 1]
    assert answer["train_dumps"] == ["0.pt"]
    dump = tmp_path / "train_data" / "0.pt"
    assert validate_files([dump]).valid
    assert len(torch.load(dump, weights_only=True)["samples"]) == 8
