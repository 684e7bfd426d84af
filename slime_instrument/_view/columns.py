"""What stands in the sample table: its columns, and how a value of each is shown."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.text import Text

from slime_instrument._view.heat import printable
from slime_instrument._view.source import Row

__all__ = ["COLUMNS", "cell", "ordered", "value_of"]

COLUMNS = (
    ("sample", "position"), ("mean |δ|", "mean_abs"), ("max |δ|", "max_abs"), ("compared", "n_tokens"),
    ("length", "length"), ("reward", "reward"), ("findings", "findings"), ("status", "status"), ("index", "index"),
)  # fmt: skip
_ASCENDING = ("position", "index", "status", "findings")
_WIDEST = 32  # characters of a cell


def value_of(row: Row, name: str) -> Any:
    value = getattr(row, name)
    return ", ".join(value) or None if isinstance(value, list) else value


def ordered(rows: Iterable[Row], by: str) -> list[Row]:
    """Numbers from the largest, everything else from the first; rows without a value come last."""
    every = list(rows)
    known = [row for row in every if value_of(row, by) is not None]
    known.sort(key=lambda row: value_of(row, by), reverse=by not in _ASCENDING)
    return known + [row for row in every if value_of(row, by) is None]


def cell(value: Any) -> Text:
    """Never markup: what stands in a dump must not style the table."""
    if value is None:
        return Text("–", justify="right")
    if isinstance(value, str):
        text = printable(value)
        return Text(text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…")
    return Text(f"{value:.4g}" if isinstance(value, float) else str(value), justify="right")
