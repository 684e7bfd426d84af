"""slime's own experiment tracking: TensorBoard and wandb, through the function that slime itself logs with."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from slime_instrument._switch import package

__all__ = ["PREFIX", "STEP_KEY", "log_metrics", "rollout_step", "slime_log"]

PREFIX = "instrument/"
STEP_KEY = "rollout/step"

# Newest first. v0.2.0 and v0.2.1 have a logging_utils without log() and keep it in tracking_utils.
_LOGGERS = ("observability.logging_utils", "utils.logging_utils", "utils.tracking_utils")
_STEPS = ("observability.metric_utils", "utils.metric_utils")


def slime_log() -> Callable[..., Any] | None:
    """slime's ``log(args, metrics, step_key)`` as this process has loaded it; None where there is none."""
    return _loaded(_LOGGERS, "log")


def rollout_step(args: Any, rollout_id: int) -> int:
    """The step under which slime logs this rollout."""
    step = _loaded(_STEPS, "compute_rollout_step")
    return rollout_id if step is None else int(step(args, rollout_id))


def log_metrics(args: Any, values: Mapping[str, float | None], step: int) -> str | None:
    """Hand the metrics that have a value to slime's tracker. Returns why nothing was logged, or None."""
    log = slime_log()
    if log is None:
        return "slime's logging function was not found"
    if not (getattr(args, "use_wandb", False) or getattr(args, "use_tensorboard", False)):
        return "neither --use-wandb nor --use-tensorboard is on"
    if getattr(args, "use_wandb", False):
        _declare_step()
    present = {f"{PREFIX}{name}": value for name, value in values.items() if value is not None}
    log(args, {**present, STEP_KEY: step}, step_key=STEP_KEY)
    return None


def _declare_step() -> None:
    """Tell wandb what the x-axis of our metrics is, as slime does for its own."""
    wandb = sys.modules.get("wandb")
    run = getattr(wandb, "run", None)
    if run is not None:
        run.define_metric(f"{PREFIX}*", step_metric=STEP_KEY)


def _loaded(modules: tuple[str, ...], name: str) -> Callable[..., Any] | None:
    for module in modules:
        found = getattr(sys.modules.get(f"{package()}.{module}"), name, None)
        if callable(found):
            return found  # type: ignore[no-any-return]
    return None
