"""The fault matrix trains for real; without megatron-core it says so and is skipped."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("megatron") is not None:
        return
    for item in items:
        if item.get_closest_marker("lab") or item.get_closest_marker("real_slime"):
            item.add_marker(
                pytest.mark.skip(reason="megatron-core is not installed: pip install 'slime-instrument[lab]'")
            )
