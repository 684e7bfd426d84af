"""What stands in the sample table: its columns, and how a value of each is shown."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from slime_instrument.view.heat import printable
from slime_instrument.view.source import Row

__all__ = ["COLUMNS", "cell", "value_of"]

COLUMNS = (
    ("sample", "position"), ("mean |δ|", "mean_abs"), ("max |δ|", "max_abs"), ("compared", "n_tokens"),
    ("length", "length"), ("reward", "reward"), ("findings", "findings"), ("status", "status"), ("index", "index"),
)  # fmt: skip
_WIDEST = 32  # characters of a cell


def value_of(row: Row, name: str) -> Any:
    value = getattr(row, name)
    return ", ".join(value) or None if isinstance(value, list) else value


def cell(value: Any) -> Text:
    """Never markup: what stands in a dump must not style the table."""
    if value is None:
        return Text("–", justify="right")
    if isinstance(value, str):
        text = printable(value)
        return Text(text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…")
    return Text(f"{value:.4g}" if isinstance(value, float) else str(value), justify="right")
