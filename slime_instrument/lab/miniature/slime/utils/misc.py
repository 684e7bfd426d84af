"""Odds and ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Box:
    """Keeps an object reference from being resolved when it is passed to a remote method."""

    inner: Any
