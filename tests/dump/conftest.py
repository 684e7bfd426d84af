"""Fixtures of the tests of one dump."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist


@pytest.fixture
def store() -> Any:
    """A key-value store as the ranks of a job share one, in this process."""
    return dist.HashStore()
