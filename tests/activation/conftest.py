"""Interpreters to start: one with the wheel installed, one that only finds the sources; and a small slime for both."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


FAKE_SLIME = {
    "slime/__init__.py": "",
    "slime/utils/__init__.py": "",
    "slime/backends/__init__.py": "",
    "slime/ray/__init__.py": "",
    "slime/backends/megatron_utils/__init__.py": "",
    "slime/utils/data.py": """
        import types
        ray = types.SimpleNamespace(get=lambda value: value)
        def process_rollout_data(args, rollout_data_ref, dp_rank, dp_size):
            return ray.get(rollout_data_ref)
        """,
    "slime/utils/train_dump_utils.py": """
        def save_debug_train_data(args, *, rollout_id, rollout_data):
            return "slime's own dump"
        """,
    "slime/backends/megatron_utils/data.py": """
        class DataIterator:
            def get_next(self, keys):
                return dict.fromkeys(keys)
        def log_rollout_data(rollout_id, args, rollout_data):
            return sorted(rollout_data)
        """,
    "slime/backends/megatron_utils/loss.py": """
        def get_log_probs_and_entropy(logits, *, args, unconcat_tokens, total_lengths, response_lengths):
            return logits, {"log_probs": [logits]}
        def policy_loss_function(args, batch, logits, sum_of_sample_mean):
            '''The loss of one micro-batch.'''
            return get_log_probs_and_entropy(
                logits, args=args, unconcat_tokens=None, total_lengths=None, response_lengths=None
            )[0] * 2
        """,
    "slime/backends/megatron_utils/model.py": """
        from slime.backends.megatron_utils.loss import policy_loss_function
        def train_one_step(args, rollout_id, step_id):
            return policy_loss_function(args, {}, 3, None)
        """,
    "slime/backends/megatron_utils/actor.py": """
        from slime.utils.data import process_rollout_data
        from slime.utils.train_dump_utils import save_debug_train_data
        from slime.backends.megatron_utils.data import DataIterator, log_rollout_data
        from slime.backends.megatron_utils.model import train_one_step
        class MegatronTrainRayActor:
            def init(self, args, role, with_ref=False):
                self.args = args
                return 0
            def train_actor(self, rollout_id, rollout_data, external_data=None):
                log_rollout_data(rollout_id, self.args, rollout_data)
                DataIterator().get_next(["tokens"])
                result = train_one_step(self.args, rollout_id, 0)
                save_debug_train_data(self.args, rollout_id=rollout_id, rollout_data=rollout_data)
                return result
        """,
    "slime/ray/actor_group.py": """
        class RayTrainGroup:
            def __init__(self, args):
                self.args = args
            def create(self):
                self._allocate_gpus_for_actor(None, 1)
                return self.environment
            def _allocate_gpus_for_actor(self, pg, num_gpus_per_actor):
                self.environment = {"NCCL": "0", **self.args.train_env_vars}
        """,
}


@dataclass
class Interpreter:
    """Starts Python with a clean environment. ``path`` goes on PYTHONPATH."""

    python: Path
    path: list[Path] = field(default_factory=list)

    def run(
        self, *arguments: object, path: list[Path] | None = None, check: bool = True, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(self.python), *map(str, arguments)],
            env=self.environment(path or [], **variables),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert not check or done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def environment(self, path: list[Path], **variables: str) -> dict[str, str]:
        ours = ("SLIME_INSTRUMENT", "PYTEST_", "PYTHON", "COV_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        entries = [str(entry) for entry in (*path, *self.path)]
        return {**kept, **({"PYTHONPATH": os.pathsep.join(entries)} if entries else {}), **variables}

    def answer(self, code: str, *, path: list[Path] | None = None, **variables: str) -> Any:
        """Run ``code``, which sets ``answer``, and return that (through JSON)."""
        program = textwrap.dedent(code) + "\nimport json; print('\\n' + json.dumps(answer))"
        return json.loads(self.run("-c", program, path=path, **variables).stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built, so that building leaves nothing behind in the checkout."""
    copy = tmp_path_factory.mktemp("sources") / "slime_instrument"
    ignored = shutil.ignore_patterns("__pycache__", ".*_cache", ".git")
    copy.mkdir()
    for name in ("slime_instrument", "sitecustomize_example", "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for path in (ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md")):
        if path.exists():
            shutil.copy(path, copy)
    return copy


def pip(*arguments: object) -> str:
    """Run pip; the test is skipped, and says so, only where the build backend cannot be had."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", *map(str, arguments)], capture_output=True, text=True, timeout=300
    )
    output = done.stdout + done.stderr
    unavailable = ("No matching distribution found for hatchling", "No module named pip")
    if done.returncode and any(reason in output for reason in unavailable):
        pytest.skip("needs pip and hatchling, and neither is here nor can it be fetched")
    assert done.returncode == 0, output
    return output


@pytest.fixture(scope="session")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, as ``pip wheel`` builds it."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", folder, sources)
    (built,) = folder.glob("slime_instrument-*.whl")
    return built


@pytest.fixture(scope="session")
def new_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Interpreter]:
    """Makes empty virtual environments that find this environment's dependencies, but none of its start-up files."""

    def make() -> Interpreter:
        folder = tmp_path_factory.mktemp("environment") / "venv"
        base = Path(sys.base_prefix, "bin", Path(sys.executable).name)
        subprocess.run([str(base), "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
        python = folder / "bin" / "python"
        # Every one of them: an environment may find packages of another one.
        places = [entry for entry in sys.path if Path(entry).name == "site-packages"]
        (site_packages(python) / "dependencies.pth").write_text("\n".join(places) + "\n")
        return Interpreter(python)

    return make


def site_packages(python: Path) -> Path:
    (found,) = python.parents[1].glob("lib/python*/site-packages")
    return found


@pytest.fixture(scope="session")
def installed(new_environment: Callable[[], Interpreter], wheel: Path) -> Interpreter:
    """An interpreter with the wheel installed."""
    interpreter = new_environment()
    pip("--python", interpreter.python, "install", "--quiet", "--no-deps", wheel)
    return interpreter


@pytest.fixture(scope="session")
def uninstalled(new_environment: Callable[[], Interpreter]) -> Interpreter:
    """An interpreter that finds the sources through PYTHONPATH alone: no start-up file."""
    interpreter = new_environment()
    interpreter.path = [ROOT]
    return interpreter


@pytest.fixture(scope="session")
def fake_slime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a slime that has every target, imports in no time, and trains nothing."""
    folder = tmp_path_factory.mktemp("fake")
    for name, text in FAKE_SLIME.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text).lstrip("\n"))
    return folder
