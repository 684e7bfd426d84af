"""Real Ray: armed where training runs, by each route; the dump is the one that the lab gets without Ray.

On the miniature, and on real slime's own ``RayTrainGroup`` where a checkout is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._validate import validate_files
from slime_instrument.lab import LabOptions, find_sources, train
from slime_instrument.lab._sources import MINIATURE

CHECKOUT = "681b3adca~1"
JOB = Path(__file__).parent / "ray_lab" / "job.py"
ROOT = Path(__file__).resolve().parents[2]
CARRIED = "carried to the train actors by an armed driver"
# A rank that is left alone writes slime's own dump; with one name for all ranks it might replace the v2 file.
PER_RANK = "{rollout_id}_{rank}.pt"
LOCAL = "SLIME_INSTRUMENT in the environment (.pth)"

pytestmark = [pytest.mark.lab, pytest.mark.ray]
full = pytest.mark.full


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


@dataclass(frozen=True)
class Cluster:
    address: str
    dashboard: str
    token: dict[str, str]
    """Variables of a client: a token that nobody else knows, whatever the user's Ray has set up."""


@pytest.fixture(scope="module")
def cluster(installed: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One Ray for all tests of this file, started as for slime: a head node, before any driver and without a setting
    of ours in its environment. Ended by its process group."""
    port, dashboard = free_ports(2)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Ray's sockets live below this folder, and their paths must be short.
    folder = Path(tempfile.mkdtemp(prefix="si-", dir="/tmp"))
    log = tmp_path_factory.mktemp("ray") / "head.log"
    with open(log, "wb") as output:
        head = subprocess.Popen(
            [
                installed.python, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}",
                f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1", "--node-ip-address=127.0.0.1",
                "--num-cpus=4", "--num-gpus=2", "--disable-usage-stats", f"--temp-dir={folder}",
            ],
            env=installed.environment([], **token), stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 180
        while not reachable(dashboard):
            assert head.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield Cluster(f"127.0.0.1:{port}", f"http://127.0.0.1:{dashboard}", token)
    finally:
        head.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)


def reachable(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module", params=["miniature", pytest.param("slime", marks=[pytest.mark.real_slime, full])])
def slime(request: pytest.FixtureRequest) -> Path | None:
    if request.param == "miniature":
        return None
    found = next((source for source in find_sources() if source.name == CHECKOUT), None)
    if found is None:
        pytest.skip(f"no slime checkout {CHECKOUT} in $SLIME_SOURCES or ~/.cache/slime-instrument/sources")
    return found


@pytest.fixture
def job(installed: Any, slime: Path | None, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Run one Ray job in the environment with the wheel; ``driver`` is SLIME_INSTRUMENT of the driver's process.
    With another ``interpreter``, which the cluster's workers do not have, Ray is started for this job alone."""

    def run(driver: str | None = None, interpreter: Any = installed, **options: Any) -> dict[str, Any]:
        variables = {} if driver is None else {"SLIME_INSTRUMENT": driver}
        if interpreter is installed:
            cluster: Cluster = request.getfixturevalue("cluster")
            variables.update(cluster.token)
            options["address"] = cluster.address
        settings = options.pop("settings", {})
        asked = {"out": str(tmp_path / "job"), "slime": slime and str(slime), **options}
        done = interpreter.run(JOB, json.dumps(asked), **variables, **settings)
        return dict(json.loads(done.stdout.splitlines()[-1]))

    return run


@pytest.fixture(scope="module")
def expected(slime: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Any]]:
    """The dump of the same training in the lab: forked processes, no Ray."""
    known: dict[tuple[int, int], dict[str, Any]] = {}

    def get(tp: int = 1, cp: int = 1) -> dict[str, Any]:
        if (tp, cp) not in known:
            result = train(LabOptions(out=tmp_path_factory.mktemp("lab"), slime=slime, tp=tp, cp=cp))
            known[tp, cp] = torch.load(result.train_dumps[0], weights_only=True)
        return known[tp, cp]

    return get


def assert_one_correct_dump(
    tmp_path: Path, answer: dict[str, Any], expected: dict[str, Any], name: str = "0.pt"
) -> str:
    """One v2 file, valid, and bit for bit what the lab got; returns the arming route that it names."""
    v2 = [file for file in answer["train_dumps"] if file == name or name == "0.pt"]
    assert v2 == [name]
    path = tmp_path / "job" / "train_data" / name
    assert validate_files([path]).valid
    found = torch.load(path, weights_only=True)
    assert len(found["samples"]) == 8
    for sample, other in zip(found["samples"], expected["samples"], strict=True):
        assert sample.keys() == other.keys()
        assert all(equal(sample[key], other[key]) for key in other), sample["rollout_position"]
    assert found["raw_reward"] == expected["raw_reward"]
    (shard,) = found["dp_shards"]
    return str(shard["provenance"]["route"])


def equal(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def assert_calls_counted(worker: dict[str, Any]) -> None:
    """The worker's own patches were called, as often as two ranks with eight micro-batches must."""
    assert worker["armed"] is True
    assert worker["wrapped"] is True
    called = {name: calls for name, (_state, calls, _reason) in worker["patches"].items()}
    assert {name: called[name] for name in ("start", "data-loader", "train-actor", "train-dump")} == dict.fromkeys(
        ("start", "data-loader", "train-actor", "train-dump"), 1
    )
    assert called["micro-batches"] == called["policy-loss"] == called["log-probs"] == 8
    assert {state for state, _, _ in worker["patches"].values()} <= {"ACTIVE", "SKIPPED"}
    assert worker["patches"]["ray-environment"][0] == "SKIPPED"


def test_driver_only_by_import_arms_the_train_actors(
    job: Callable[..., Any], expected: Callable[..., Any], tmp_path: Path
) -> None:
    answer = job(
        cp=2, driver_import=True, settings={"SLIME_INSTRUMENT_BUCKET_MB": "8"},
        job_env={"SLIME_INSTRUMENT_BUCKET_MB": "16"}, train_env={"MY_OWN": "kept"},
    )  # fmt: skip
    assert answer["driver_armed"] is True
    for worker in answer["workers"]:
        assert_calls_counted(worker)
        assert worker["route"] == f"import slime_instrument, {CARRIED}"
        assert worker["settings"]["SLIME_INSTRUMENT_BUCKET_MB"] == 8.0, "the driver's settings came along"
    assert answer["train_env_vars"] == {"MY_OWN": "kept"}, "slime's arguments are as the user gave them"
    route = assert_one_correct_dump(tmp_path, answer, expected(cp=2))
    assert route == f"import slime_instrument, {CARRIED}"


@full
def test_workers_only_by_the_jobs_runtime_env(
    job: Callable[..., Any], expected: Callable[..., Any], tmp_path: Path
) -> None:
    answer = job(cp=2, driver="0", job_env={"SLIME_INSTRUMENT": "1"})
    assert answer["driver_armed"] is False
    for worker in answer["workers"]:
        assert_calls_counted(worker)
        assert worker["route"] == LOCAL
    assert assert_one_correct_dump(tmp_path, answer, expected(cp=2)) == LOCAL


@full
def test_driver_and_workers_both_armed(job: Callable[..., Any], expected: Callable[..., Any], tmp_path: Path) -> None:
    """The known trap: Ray re-closes over the driver's wrapped methods and must not ship the originals."""
    answer = job(cp=2, driver="1", job_env={"SLIME_INSTRUMENT": "1"})
    assert answer["driver_armed"] is True
    for worker in answer["workers"]:
        assert_calls_counted(worker)
    armed_lines = [[line for line in worker["log"] if "armed by" in line] for worker in answer["workers"]]
    assert [len(lines) for lines in armed_lines] == [1, 1], "each armed process says so, once"
    (written,) = (line for worker in answer["workers"] for line in worker["log"] if "wrote" in line)
    assert "0.pt" in written
    assert "% of the train step" in written
    assert assert_one_correct_dump(tmp_path, answer, expected(cp=2)) == f"{LOCAL}, {CARRIED}"


@full
def test_the_users_zero_in_train_env_vars_wins_over_an_armed_driver(
    job: Callable[..., Any], slime: Path | None
) -> None:
    answer = job(cp=2, driver_import=True, train_env={"SLIME_INSTRUMENT": "0"})
    for worker in answer["workers"]:
        assert (worker["armed"], worker["wrapped"], worker["log"]) == (False, False, [])
    assert answer["train_env_vars"] == {"SLIME_INSTRUMENT": "0"}


@full
def test_one_rank_off_that_holds_a_part_is_noticed_without_waiting_and_logged_once(
    job: Callable[..., Any], tmp_path: Path
) -> None:
    answer = job(cp=2, driver="0", job_env={"SLIME_INSTRUMENT": "1"}, off_rank=1, dump_name=PER_RANK)
    on, off = answer["workers"]
    assert (on["armed"], off["armed"]) == (True, False)
    errors = [line for line in on["log"] if line.startswith("ERROR")]
    assert len(errors) == 1
    assert "rank(s) [1] train without instrumentation; a dump needs all of ranks [0, 1]" in errors[0]
    assert "Training goes on" in errors[0]
    assert answer["train_s"] < 60, "nobody waits 120 s for a rank that is not armed"
    assert answer["train_dumps"] == ["0_1.pt"], "no v2 file; the rank that is left alone writes slime's own dump"
    assert torch.load(tmp_path / "job" / "train_data" / "0_1.pt", weights_only=True)["rank"] == 1


@full
def test_one_rank_off_that_holds_no_part_changes_nothing(
    job: Callable[..., Any], expected: Callable[..., Any], tmp_path: Path
) -> None:
    """Tensor-parallel rank 1 holds the same token values as rank 0, which writes them."""
    answer = job(tp=2, driver="0", job_env={"SLIME_INSTRUMENT": "1"}, off_rank=1, dump_name=PER_RANK)
    on, off = answer["workers"]
    assert (on["armed"], off["armed"]) == (True, False)
    assert [line for line in on["log"] if not line.startswith("INFO")] == []
    assert answer["train_dumps"] == ["0_0.pt", "0_1.pt"]
    assert assert_one_correct_dump(tmp_path, answer, expected(tp=2), "0_0.pt") == LOCAL
    alone = torch.load(tmp_path / "job" / "train_data" / "0_1.pt", weights_only=True)
    assert set(alone) == {"rollout_id", "rank", "rollout_data"}, "slime's own dump, of the rank that is left alone"


@full
def test_the_setup_hook_arms_workers_that_can_only_import_the_package(
    job: Callable[..., Any], uninstalled: Any, expected: Callable[..., Any], tmp_path: Path, slime: Path | None
) -> None:
    hook = "slime_instrument._activation.boot.worker_process_setup_hook"
    answer = job(
        cp=2, driver="0", interpreter=uninstalled, setup_hook=hook, importable=str(ROOT),
        job_env={"SLIME_INSTRUMENT": "1"},
    )  # fmt: skip
    for worker in answer["workers"]:
        assert_calls_counted(worker)
    assert assert_one_correct_dump(tmp_path, answer, expected(cp=2)) == "worker_process_setup_hook"


def test_one_variable_in_the_runtime_env_of_ray_job_submit_is_enough(
    cluster: Cluster, installed: Any, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    stubs = MINIATURE.parent / "stubs"
    runtime_env = {
        "env_vars": {
            "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "LAB_LOGS": str(tmp_path / "logs"), "LAB_STUBS": str(stubs), "LAB_REAL": "",
            "PYTHONPATH": os.pathsep.join(map(str, [JOB.parent / "worker_site", MINIATURE, stubs])),
            "SLIME_INSTRUMENT": "1",
        }
    }  # fmt: skip
    options = json.dumps({"out": str(tmp_path), "cp": 2, "submitted": True})
    done = installed.run(
        "-m", "ray.scripts.scripts", "job", "submit", f"--address={cluster.dashboard}",
        f"--runtime-env-json={json.dumps(runtime_env)}", "--", installed.python, JOB, options,
        **cluster.token,
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
