"""The global argument namespace."""

from __future__ import annotations

from typing import Any

_arguments: list[Any] = []


def get_args() -> Any:
    return _arguments[-1]


def set_args(args: Any) -> None:
    _arguments[:] = [args]


def _build_tokenizer(_args: Any) -> None:
    return None
