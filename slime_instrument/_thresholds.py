"""Thresholds on metrics: ``abs_diff.mean>0.05,ess<0.5``. Standard library only: settings are read at start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["METRICS", "NO_ALERTS", "Alert", "Alerts", "parse_alerts"]

METRICS = (
    "abs_diff.mean", "abs_diff.max", "abs_diff.p50", "abs_diff.p95", "abs_diff.p99", "train_rollout_logprob_abs_diff",
    "prob_diff.mean", "prob_diff.max", "prob_diff.std", "prob_diff.pearson", "k1", "k2", "k3", "token_mult_prob_error",
    "chi2_token", "chi2_seq", "seq_ratio", "geo_ratio", "ppl_ratio", "ess", "tis.clip_fraction",
    "tis.mean_abs_rho_minus_1", "icepop.dropped_fraction", "geo_rs.dropped_fraction", "veto.dropped_fraction",
)  # fmt: skip
"""Names of the metrics that are logged, as ``slime-instrument compare --json`` nests them."""

_TERM = re.compile(r"(?P<metric>[\w.]+)\s*(?P<sign>[<>])\s*(?P<limit>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)")


@dataclass(frozen=True)
class Alert:
    """One threshold. ``sign`` is ``<`` or ``>``."""

    metric: str
    sign: str
    limit: float

    def passed(self, values: Mapping[str, float | None]) -> bool:
        """Whether the metric is beyond the threshold. A metric without a value is not."""
        value = values.get(self.metric)
        if value is None:
            return False
        return value > self.limit if self.sign == ">" else value < self.limit

    def __str__(self) -> str:
        return f"{self.metric}{self.sign}{self.limit:g}"


@dataclass(frozen=True)
class Alerts:
    """Every threshold that was asked for; false where there is none."""

    each: tuple[Alert, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.each)

    def __str__(self) -> str:
        return ",".join(map(str, self.each))


NO_ALERTS = Alerts()


def parse_alerts(text: str) -> Alerts:
    """Read a setting. ValueError, in words, for anything but thresholds on known metrics."""
    found = []
    for term in filter(None, (part.strip() for part in text.split(","))):
        match = _TERM.fullmatch(term)
        if match is None or match["metric"] not in METRICS:
            raise ValueError(f"thresholds such as abs_diff.mean>0.05,ess<0.5 on any of {', '.join(METRICS)}")
        found.append(Alert(match["metric"], match["sign"], float(match["limit"])))
    return Alerts(tuple(found))
