"""Lab tests train for real; without megatron-core, or without real slime, they say so and are skipped."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_instrument.lab import find_sources


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("megatron") is not None:
        return
    for item in items:
        if item.get_closest_marker("lab") or item.get_closest_marker("real_slime"):
            item.add_marker(
                pytest.mark.skip(reason="megatron-core is not installed: pip install 'slime-instrument[lab]'")
            )


@pytest.fixture(scope="session")
def checkout() -> Callable[[str], Path]:
    """The slime checkout with this folder name; the test is skipped where there is none."""

    def find(name: str) -> Path:
        found = next((source for source in find_sources() if source.name == name), None)
        if found is None:
            pytest.skip(f"no slime checkout named {name} in $SLIME_SOURCES or ~/.cache/slime-instrument/sources")
        return found

    return find
