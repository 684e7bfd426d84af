"""Slime checkouts by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime_instrument.lab import find_sources


@pytest.fixture(scope="session")
def checkout() -> Callable[[str], Path]:
    """The slime checkout with this folder name; the test is skipped where there is none."""

    def find(name: str) -> Path:
        found = next((source for source in find_sources() if source.name == name), None)
        if found is None:
            pytest.skip(f"no slime checkout named {name} in $SLIME_SOURCES or ~/.cache/slime-instrument/sources")
        return found

    return find
