"""What all tests share: what a test needs that this machine may not have, said in one line for all that lack it."""

from __future__ import annotations

import functools
import importlib.util
import os

# Before torch is imported, here and in every process that a test starts: the tests share the cores among processes, and
# threads of torch's that wait for each other on a busy core made them take three times as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from slime_instrument.lab import find_sources

pytest_plugins = ["pytester"]

#: The last slime release that has no v2 dump of its own: what most tests on real slime train.
CHECKOUT = "681b3adca~1"


@functools.cache
def _lacking(marker: str) -> str | None:
    """Why tests with this marker cannot run here; None where they can."""
    if importlib.util.find_spec("megatron") is None:
        return "megatron-core is not installed: install slime-instrument[lab]"
    if marker == "ray" and importlib.util.find_spec("ray") is None:
        return "ray is not installed: install slime-instrument[lab]"
    if marker == "real_slime" and all(source.name != CHECKOUT for source in find_sources()):
        return f"no slime checkout named {CHECKOUT} in $SLIME_SOURCES or ~/.cache/slime-instrument/sources"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    # Raised here and not as a mark of each test: pytest then folds all of them into one line of its summary.
    for marker in ("lab", "ray", "real_slime"):
        reason = _lacking(marker) if item.get_closest_marker(marker) else None
        if reason is not None:
            pytest.skip(reason)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take longest come first, so that two processes that share the files end together."""
    first = ("ray", "real_slime", "lab")
    slowest = {item.path: len(first) for item in items}
    for item in items:
        places = [first.index(marker.name) for marker in item.iter_markers() if marker.name in first]
        slowest[item.path] = min([slowest[item.path], *places])
    items.sort(key=lambda item: slowest[item.path])
