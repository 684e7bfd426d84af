"""Limits on metrics: ``abs_diff.mean>0.05``, ``ess<0.5``. One grammar for the command line and the settings.

Standard library only: settings are read before anything heavy is loaded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

METRICS = (
    "abs_diff.mean", "abs_diff.max", "abs_diff.p50", "abs_diff.p95", "abs_diff.p99", "train_rollout_logprob_abs_diff",
    "prob_diff.mean", "prob_diff.max", "prob_diff.std", "prob_diff.pearson", "k1", "k2", "k3", "token_mult_prob_error",
    "chi2_token", "chi2_seq", "seq_ratio", "geo_ratio", "ppl_ratio", "ess", "tis.mean_weight", "tis.clip_fraction",
    "tis.mean_abs_rho_minus_1", "icepop.mean_weight", "icepop.dropped_fraction", "geo_rs.dropped_fraction",
    "veto.dropped_fraction",
)  # fmt: skip
"""Names of the metrics that can be limited, as ``slime-instrument compare --json`` nests them."""

COUNTS = (
    "n_tokens", "n_joined", "n_train", "n_rollout", "excluded.masked", "excluded.missing", "excluded.nan",
    "excluded.inf", "excluded.filler", "excluded.removed",
)  # fmt: skip
"""Counts that can be limited on the command line, too."""

_SHORTHANDS = {"abs_diff": "abs_diff.mean", "prob_diff": "prob_diff.mean", "mean_abs_diff": "abs_diff.mean"}
_TERM = re.compile(r"\s*(?P<metric>[\w.]+)\s*(?P<sign>[<>=])\s*(?P<limit>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")


@dataclass(frozen=True)
class Threshold:
    """One limit. A comparison breaks it where the metric is above (``>``) or below (``<``) the limit.

    Attributes:
        metric: dotted name.
        sign: ``>`` or ``<``.
        limit: a finite number.
    """

    metric: str
    sign: str
    limit: float

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.limit:g}"

    def broken_by(self, value: float | None) -> bool:
        """Whether a value breaks the limit: one that exceeds what a float holds is above every limit, and no value at
        all passes none."""
        if value is None:
            return True
        if math.isnan(value):
            value = math.inf
        return value > self.limit if self.sign == ">" else value < self.limit


def parse_threshold(text: str, *, names: tuple[str, ...] = METRICS) -> Threshold:
    """Read ``METRIC>VALUE`` or ``METRIC<VALUE``; ``METRIC=VALUE`` means ``>``, ``abs_diff`` alone its mean.

    Args:
        text: the limit.
        names: the metrics that can be limited here.

    Raises:
        ValueError: in words that follow "expected", for anything else.
    """
    match = _TERM.fullmatch(text)
    if match is None or not math.isfinite(float(match["limit"])):
        raise ValueError("METRIC>VALUE or METRIC<VALUE with a finite number, such as abs_diff.mean>0.05 or ess<0.5")
    metric = _SHORTHANDS.get(match["metric"], match["metric"])
    if metric not in names:
        raise ValueError(f"one of the metrics {', '.join(names)}")
    return Threshold(metric, "<" if match["sign"] == "<" else ">", float(match["limit"]))


@dataclass(frozen=True)
class Thresholds:
    """Every limit that was asked for; false where there is none."""

    each: tuple[Threshold, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.each)

    def __str__(self) -> str:
        return ",".join(map(str, self.each))

    def broken(self, value_of: Callable[[str], float | None]) -> list[Threshold]:
        """The limits that are broken.

        Args:
            value_of: the value of a metric by its name; None where it has none.
        """
        return [one for one in self.each if one.broken_by(value_of(one.metric))]


NO_THRESHOLDS = Thresholds()


def parse_thresholds(text: str) -> Thresholds:
    """Read a setting: limits with commas between them.

    Raises:
        ValueError: in words that follow "expected", for anything but limits on known metrics.
    """
    terms = [part for part in text.split(",") if part.strip()]
    return Thresholds(tuple(parse_threshold(term) for term in terms))


def shown_value(value: float | None) -> str:
    """A metric's value for messages."""
    if value is None:
        return "without a value"
    return f"{value:.4g}" if math.isfinite(value) else "more than a float holds"
