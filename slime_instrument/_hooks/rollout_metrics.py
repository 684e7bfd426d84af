"""Rollout metrics: no key of ours ever shows up in what slime logs.

``log_rollout_data`` averages every list that it does not know. It also adds keys of its own to the dict, which belong
in the dump; so it gets the very same dict, with our keys out of it for the length of the call. Since #2266 slime
itself logs a meaningless ``rollout/partition``, which disappears the same way.
"""

from __future__ import annotations

from slime_instrument._capture import LOCAL_KEY, POSITION_KEY
from slime_instrument._patching.declaration import Advice, Call, Patch, Target


def hide_positions(call: Call) -> Advice | None:
    if getattr(call["args"], "save_debug_train_data", None) is None:
        return None
    rollout_data = call["rollout_data"]
    hidden = {key: rollout_data.pop(key) for key in (POSITION_KEY, LOCAL_KEY) if key in rollout_data}
    if not hidden:
        return None
    return Advice(cleanup=lambda: rollout_data.update(hidden))


PATCHES = (
    Patch(
        name="rollout-metrics",
        group="metrics",
        targets=(
            Target("slime.observability.train_metric_utils", "log_rollout_data"),
            Target("slime.backends.megatron_utils.data", "log_rollout_data"),
        ),
        relies_on=("rollout_id", "args", "rollout_data"),
        before=hide_positions,
        # A key that is visible on one rank only makes slime's gather of the metrics raise, and training end.
        rescue=hide_positions,
        lost="A key of ours may show up in slime's metrics.",
    ),
)
