"""Whether reading a checkout tells of every patch what training with it tells."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_instrument._activation.check import check


@functools.cache
def probed(source: Path) -> list[dict[str, Any]]:
    """The patches of ``slime-instrument check --slime``, as they are in its JSON."""
    return [patch.as_dict() for patch in check(source).patches]


def check_agrees(probed: Sequence[Mapping[str, Any]], live: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Where the states of patches told by reading a checkout are not those of a process that trained with it. One that
    fits is pending for the reader and active in the run, or skipped there when nothing imports its module."""
    states = {patch["name"]: patch for patch in live}
    if [patch["name"] for patch in probed] != list(states):
        yield f"check knows {[patch['name'] for patch in probed]}, the run {list(states)}"
        return
    for patch in probed:
        lived = states[patch["name"]]
        fits = patch["state"] == "PENDING"
        unused = lived["state"] == "SKIPPED" and "imported" in lived["reason"]
        if not (lived["state"] == "ACTIVE" or unused if fits else lived["state"] == patch["state"]):
            yield f"{patch['name']}: check says {patch['state']}, the run {lived['state']} ({lived['reason']})"
