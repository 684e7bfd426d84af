"""What wrapping does while it is off, armed and capturing: objects and operations, no seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def found(run_json: Callable[..., Any]) -> Any:
    return run_json("overhead", "--samples", "3", "--tokens", "8", "--vocabulary", "11")


def test_off_leaves_every_target_the_original_object(found: Any) -> None:
    assert found["off"] == {"targets_are_the_originals": True, "again_after_uninstrument": True}


def test_armed_wraps_every_place_that_is_measured(found: Any) -> None:
    assert found["not_wrapped"] == []
    assert "policy_loss_function" in found["armed_s_per_call"]


def test_capture_takes_at_most_two_operations_per_micro_batch(found: Any) -> None:
    assert 1 <= found["capture"]["operations"] <= 2
