"""Where a dump came from: the one thing in the file that is ours alone."""

from __future__ import annotations

from typing import Any

from slime_instrument._dump.contribute import Seen
from slime_instrument._dump.topology import Topology
from slime_instrument._versions import versions

__all__ = ["describe"]


def describe(
    data: dict[str, Any], topology: Topology, seen: Seen, cp_fields: tuple[str, ...], qkv_format: str
) -> dict[str, Any]:
    """Versions, sizes, the arming route, and per response-level field where its values come from.

    ``fields``: "rollout" came with the samples, "captured" is the training forward's own value, "recomputed" was
    computed before the training steps. ``positions``: "partition" is slime's own word, "reconstructed" was worked out
    and proven (v0.2.0), "unknown" means that samples are ordered by their index. ``captured_optimizer_steps``: per
    local sample, the step within the rollout at which it was captured. ``log_probs`` says in words why that field is
    absent, where it is.
    """
    present = [name for name in cp_fields if data.get(name) is not None]
    sources = {name: "rollout" if name in seen.came_with_rollout else "recomputed" for name in present}
    if "log_probs" in sources and (seen.log_probs is not None or seen.captured_by_slime):
        sources["log_probs"] = "captured"
    described: dict[str, Any] = {
        **versions(),
        **topology.sizes(),
        "route": seen.route,
        "qkv_format": qkv_format,
        "fields": sources,
        "positions": seen.positions_from,
    }
    if seen.optimizer_steps is not None:
        described["captured_optimizer_steps"] = list(seen.optimizer_steps)
    if "log_probs" not in sources:
        described["log_probs"] = seen.why_no_log_probs
    return described
