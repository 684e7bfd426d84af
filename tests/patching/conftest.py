"""Throw-away packages to patch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slime_instrument._patching.failures import FailurePolicy
from slime_instrument._patching.patch import Patch
from slime_instrument._patching.patcher import Patcher

from .world import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """Modules written by the test, importable for its length only."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = World(tmp_path)
    yield made
    made.forget()


@pytest.fixture
def patcher() -> Iterator[Callable[..., Patcher]]:
    """Makes patchers, lenient unless told otherwise; all are disarmed afterwards."""
    made: list[Patcher] = []

    def make(*patches: Patch, strict: bool = False, limit: int = 3) -> Patcher:
        made.append(Patcher(patches, FailurePolicy(lambda: strict, limit)))
        return made[-1]

    yield make
    for each in made:
        each.disarm()
