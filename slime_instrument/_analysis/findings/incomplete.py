"""The train side lacks samples that its own schedule counts."""

from __future__ import annotations

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.evidence import View
from slime_instrument._format.values import show

CODE = "incomplete"
ORDER = 10


def find(view: View) -> Finding | None:
    schedule = view.join.schedule
    if schedule.complete:
        return None
    missing = sorted(schedule.missing)
    total = len(view.rollout.samples) - len(schedule.not_scheduled)
    message = f"{total - len(missing)} of {total} scheduled samples are in the train dump"
    if missing:
        indices = [view.rollout.samples[position].get("index") for position in missing]
        message += f"; missing: positions {show(missing)} (sample_index {show(indices)})"
    if schedule.n_shards is not None and schedule.shards < schedule.n_shards:
        message += f"; {schedule.shards} of {schedule.n_shards} data-parallel shards are there"
    evidence = {
        "n_executions": schedule.n_covered,
        "n_scheduled": schedule.n_scheduled,
        "dp_shards": schedule.shards,
        "dp_shards_written": schedule.n_shards,
    }
    return Finding(CODE, f"{message}. A rank's part was not written or its file is gone.", tuple(missing), evidence)
