"""Imports the target, real slime or the miniature, on the CPU and once: the ranks are forked from here."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from slime_instrument.lab._options import LabOptions
from slime_instrument.lab._sources import MINIATURE, source_version

_STUBS = Path(__file__).parent / "stubs"


def describe(options: LabOptions) -> str:
    return "the bundled miniature" if options.slime is None else f"slime {version(options)}"


def version(options: LabOptions) -> str | None:
    return None if options.slime is None else source_version(options.slime)


def prepare(options: LabOptions) -> ModuleType:
    """Return the target's actor module, everything that training imports loaded."""
    # A folder of the user's that is called slime must not win over the target: the working directory goes last.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path.cwd()] + [str(Path.cwd())]
    sys.path.insert(0, str(options.slime or MINIATURE))
    # Megatron-LM's megatron.training is on no index; ours joins the namespace package of megatron-core.
    sys.path.append(str(_STUBS))
    if options.core:
        sys.path.insert(1, str(options.core))

    import torch

    torch.set_num_threads(1)
    from slime_instrument.lab import _cpu

    _cpu.install()
    _share_by_pickle(real_ray=options.slime is not None)
    if options.plugin:
        plugin = load_file(options.plugin, "plugin")
        if hasattr(plugin, "before_slime"):
            plugin.before_slime()
    if options.instrumented:
        _arm()
    if options.slime is not None:
        from slime_instrument.lab import _releases, _sglang

        _sglang.install()
        _releases.before_import()
    actor_module = importlib.import_module("slime.backends.megatron_utils.actor")
    importlib.import_module("slime.ray.rollout")
    _cpu.after_megatron_import()
    if options.slime is not None:
        _releases.after_import()
    # slime collects garbage often; scanning everything imported each time would be nearly all of the run.
    gc.collect()
    gc.freeze()
    return actor_module


def load_file(path: Path, name: str) -> ModuleType:
    """Execute a Python file as a module."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _arm() -> None:
    import slime_instrument

    slime_instrument.instrument()


def _share_by_pickle(*, real_ray: bool) -> None:
    """Rollout data crosses from manager to trainer as bytes, so that no rank sees another's objects.

    The miniature asks for nothing but ``put`` and ``get``; without real slime, Ray need not be installed.
    """
    if real_ray:
        ray: Any = importlib.import_module("ray")
    else:
        ray = sys.modules["ray"] = ModuleType("ray", "Stand-in of the slime_instrument lab: put and get, by pickle.")
    ray.put = lambda value, **_options: pickle.dumps(value)
    ray.get = lambda value, **_options: pickle.loads(value)
