"""What happens after a dump: measure, log with slime's own trackers, append one JSON line, warn. Never raises into
training."""

from __future__ import annotations

import json
import logging
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_instrument._dump.file import dump_template
from slime_instrument._errors import describe, log, not_ours, traceback_text
from slime_instrument._settings import Settings
from slime_instrument._thresholds import Threshold, shown_value

if TYPE_CHECKING:
    from slime_instrument._live.measure import Measured
import sys
from collections.abc import Callable

from slime_instrument._switch import package

METRICS_FILE = "metrics.jsonl"


class LiveMetrics:
    """The live metrics of one process. ``settings.metrics`` asks for logging, ``settings.alert`` for warnings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._warned_of: set[str] = set()
        self._failed = False

    def after_dump(self, args: Any, rollout_id: int, payload: Mapping[str, Any], path: Path) -> None:
        """Take one dump. Called on the writer, which also is the rank where slime starts its trackers (data- and
        context-parallel rank 0, tensor-parallel rank 0, last pipeline stage). No communication."""
        if not (self._settings.metrics or self._settings.alert):
            return
        try:
            self._take(args, rollout_id, payload, path)
        except Exception as error:
            if not_ours(error):
                raise
            # A metric is worth less than the training that it watches.
            level = logging.DEBUG if self._failed else logging.WARNING
            self._failed = True
            shown = traceback_text(error) if self._settings.strict else describe(error)
            log(
                level, "slime_instrument: no live metrics for rollout %s: %s. The dump is not affected.",
                rollout_id, shown,
            )  # fmt: skip

    def _take(self, args: Any, rollout_id: int, payload: Mapping[str, Any], path: Path) -> None:
        from slime_instrument._analysis.verdict import LEVELS
        from slime_instrument._live.measure import measure_payload  # brings the analysis along

        began = time.monotonic()
        measured = measure_payload(payload, path)
        step = rollout_step(args, rollout_id)
        broken = self._settings.alert.broken(measured.metrics.value)
        if self._settings.metrics:
            shown: dict[str, float | None] = {
                **measured.metrics.flat(), "n_tokens": measured.metrics.n_tokens, "findings": len(measured.findings),
                "verdict": LEVELS.index(measured.verdict.level),
            }  # fmt: skip
            untracked = _log(args, shown, step)
            line = {
                **measured.as_dict(), "rollout_id": rollout_id, "step": step, "time": round(time.time(), 3),
                "dump": str(path), "alerts": [str(one) for one in broken], "not_tracked": untracked,
                "seconds": round(time.monotonic() - began, 4),
            }  # fmt: skip
            append_line(metrics_file(args, path), line)
        self._say(args, rollout_id, measured, broken, path)

    def _say(self, args: Any, rollout_id: int, measured: Measured, broken: list[Threshold], path: Path) -> None:
        """Findings when they first appear, and thresholds each time, with the command that shows more."""
        if self._settings.metrics:
            for one in measured.findings:
                if one.code not in self._warned_of:
                    log(logging.WARNING, "slime_instrument: rollout %s: %s: %s", rollout_id, one.code, one.message)
        self._warned_of = {one.code for one in measured.findings}
        if broken:
            values = {one.metric: measured.metrics.value(one.metric) for one in broken}
            found = ", ".join(f"{name} is {shown_value(value)}" for name, value in values.items())
            log(
                logging.WARNING, "slime_instrument: rollout %s: alert %s: %s. Look at it with: %s",
                rollout_id, ", ".join(map(str, broken)), found, report_command(args, rollout_id, path),
            )  # fmt: skip


def _log(args: Any, values: Mapping[str, float | None], step: int) -> str | None:
    """Why the tracker got nothing, or None. A tracker that fails does not cost the JSON line."""
    try:
        return log_metrics(args, values, step)
    except Exception as error:
        if not_ours(error):
            raise
        return describe(error)


def metrics_file(args: Any, path: Path) -> Path:
    """Beside the dumps: in the last folder whose name holds no placeholder."""
    head = dump_template(args).partition("{")[0]
    folder = Path(head) if head.endswith(os.sep) else Path(head).parent
    return (folder if head else path.parent) / METRICS_FILE


def append_line(file: Path, record: Mapping[str, Any]) -> None:
    """Add one line of strict JSON. A line that a crash cut short stays alone on its line."""
    text = json.dumps(record, allow_nan=False, default=str) + "\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab+") as out:
        if out.tell() or out.seek(0, os.SEEK_END):
            out.seek(-1, os.SEEK_END)
            if out.read(1) != b"\n":
                text = "\n" + text
        out.write(text.encode())


def report_command(args: Any, rollout_id: int, path: Path) -> str:
    """The command that shows the page about this rollout."""
    source = getattr(args, "save_debug_rollout_data", None)
    rollout = str(source).replace("{rollout_id}", str(rollout_id)) if source else "ROLLOUT_DUMP"
    return f"slime-instrument report {shlex.quote(rollout)} {shlex.quote(str(path))} -o report-{rollout_id}.html"


# --- slime's own experiment tracking: TensorBoard and wandb, through the function that slime itself logs with ---


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
