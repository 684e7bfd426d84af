"""``--fail-above METRIC=VALUE``: limits that make a comparison fail."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_instrument._errors import InstrumentError, five_parts

__all__ = ["Threshold", "ThresholdError", "parse_threshold", "passed", "value_of"]

SHORTHANDS = {"abs_diff": "abs_diff.mean", "prob_diff": "prob_diff.mean", "mean_abs_diff": "abs_diff.mean"}


class ThresholdError(InstrumentError, ValueError):
    """A threshold that is no METRIC=VALUE, or names no metric."""


@dataclass(frozen=True)
class Threshold:
    """The comparison fails where the metric is above ``limit``. ``metric`` is a dotted path into the record."""

    metric: str
    limit: float


def parse_threshold(text: str) -> Threshold:
    """Parse ``METRIC=VALUE``. ``abs_diff`` alone means its mean.

    Raises:
        ThresholdError: not of that form, or the value is no finite number.
    """
    metric, equals, value = text.partition("=")
    try:
        limit = float(value)
    except ValueError:
        limit = math.nan
    if not equals or not metric.strip() or not math.isfinite(limit):
        raise ThresholdError(
            five_parts(
                "--fail-above",
                expected="METRIC=VALUE with a finite number",
                found=repr(text),
                follows="Nothing was compared.",
                next_step="Example: --fail-above abs_diff.mean=0.05",
            )
        )
    return Threshold(SHORTHANDS.get(metric.strip(), metric.strip()), limit)


def value_of(record: Mapping[str, Any], metric: str) -> float | None:
    """The metric's value; None where there was nothing to measure.

    Raises:
        ThresholdError: the record has no such number.
    """
    value: Any = record
    parts = metric.split(".")
    for k, part in enumerate(parts):
        if value is None and k:
            return None  # a family that has nothing to measure
        if not isinstance(value, Mapping) or part not in value:
            raise ThresholdError(_unknown(record, metric))
        value = value[part]
    if isinstance(value, (Mapping, str, list, bool)):
        raise ThresholdError(_unknown(record, metric))
    return None if value is None else float(value)


def passed(record: Mapping[str, Any], thresholds: Sequence[Threshold]) -> list[dict[str, Any]]:
    """The thresholds that the record is above: metric, limit and value."""
    found = []
    for threshold in thresholds:
        value = value_of(record, threshold.metric)
        if value is not None and value > threshold.limit:
            found.append({"metric": threshold.metric, "limit": threshold.limit, "value": value})
    return found


def _unknown(record: Mapping[str, Any], metric: str) -> str:
    names: list[str] = []
    for name, value in record.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            names.append(name)
        elif isinstance(value, Mapping):
            names += [f"{name}.{key}" for key, item in value.items() if isinstance(item, (int, float))]
    return five_parts(
        "--fail-above",
        expected="one of " + ", ".join(names),
        found=repr(metric),
        follows="No threshold was applied.",
        next_step="The names are those of --json, joined by dots.",
    )
