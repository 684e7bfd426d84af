"""Where a dump came from: the one thing in the file that is ours alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime_instrument._capture import POSITION_KEY, CaptureSession
from slime_instrument._dump.topology import Topology
from slime_instrument._versions import versions

if TYPE_CHECKING:
    from slime_instrument._runtime import Runtime

__all__ = ["describe"]


def describe(
    data: dict[str, Any],
    runtime: Runtime,
    topology: Topology,
    session: CaptureSession | None,
    cp_fields: tuple[str, ...],
    qkv_format: str,
    captured_steps: list[int | None] | None,
) -> dict[str, Any]:
    """Versions, sizes, the arming route, and per response-level field where its values come from.

    ``fields``: "rollout" came with the samples, "captured" is the training forward's own value, "recomputed" was
    computed before the training steps. ``positions``: "partition" is slime's own word, "reconstructed" was worked out
    and proven (v0.2.0), "unknown" means that samples are ordered by their index. ``captured_optimizer_steps``: per
    local sample, the step within the rollout at which it was captured. ``log_probs`` says in words why that field is
    absent, where it is.
    """
    present = [name for name in cp_fields if data.get(name) is not None]
    came_with_rollout = session.keys_at_start if session is not None else frozenset()
    natively_captured = session is not None and session.native_capture
    sources = {name: "rollout" if name in came_with_rollout else "recomputed" for name in present}
    if "log_probs" in sources and (captured_steps is not None or natively_captured):
        sources["log_probs"] = "captured"
    described: dict[str, Any] = {
        **versions(),
        **topology.sizes(),
        "route": runtime.route,
        "qkv_format": qkv_format,
        "fields": sources,
        "positions": runtime.positions_from if POSITION_KEY in data else "unknown",
    }
    if captured_steps is not None:
        described["captured_optimizer_steps"] = captured_steps
    if "log_probs" not in sources:
        described["log_probs"] = _why_absent(session, runtime)
    return described


def _why_absent(session: CaptureSession | None, runtime: Runtime) -> str:
    if session is None:
        return "not computed by slime, and no capture session was open"
    inactive = [
        f"{r.patch.name} is {r.state}: {r.reason}"
        for r in runtime.patcher
        if r.patch.group == "capture" and (r.inert or r.bypassed)
    ]
    if inactive and not session.native_capture:
        return "not captured: " + "; ".join(inactive)
    return "the loss of this run computes no policy log-probs"
