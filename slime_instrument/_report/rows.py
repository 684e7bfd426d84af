"""The sample table of one rollout: every sample of the rollout dump, compared or not."""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from slime_instrument._analysis.compare import Comparison
from slime_instrument._analysis.drift import staleness_of
from slime_instrument._analysis.metrics import SampleMetrics
from slime_instrument._format.values import number, whole_number

__all__ = ["COLUMNS", "sample_rows"]

COLUMNS = (
    "position", "index", "group", "status", "reward", "reward_text", "response_length", "n_tokens", "masked",
    "advantage", "mean_abs", "max_abs", "mean", "staleness", "dp_rank", "findings", "left_out",
)  # fmt: skip
"""Cells of a row, in order. None is "not known", never 0. ``left_out`` is why the sample was not compared."""

_TRAIN_ONLY = "train only: "


def sample_rows(compared: Comparison) -> list[list[Any]]:
    """One row per sample, in rollout order; train samples that belong to no rollout sample come last."""
    found: dict[int, list[str]] = {}
    for finding in compared.findings:
        for position in finding.samples:
            found.setdefault(position, []).append(finding.code)
    advantages = _advantages(compared)
    staleness = staleness_of(compared.table, compared.train_dump.provenance.weight_version)
    rows = []
    for i, (pair, measured) in enumerate(zip(compared.joined.pairs, compared.samples, strict=True)):
        rows.append(
            {
                **_of_rollout(compared, pair.position),
                **{name: getattr(measured, name) for name in ("n_tokens", "masked", "mean_abs", "max_abs", "mean")},
                "response_length": measured.response_length,
                "index": pair.index,
                "advantage": advantages[i],
                "staleness": staleness[i],
                "dp_rank": whole_number(pair.train.get("data_parallel_rank")),
                "left_out": _why_empty(measured),
            }
        )
    for one in compared.joined.unmatched:
        known = _of_rollout(compared, one.position) if one.side == "rollout" and one.position is not None else {}
        reason = one.reason if one.side == "rollout" else f"{_TRAIN_ONLY}{one.reason}"
        rows.append({**known, "position": one.position, "index": one.index, "left_out": reason})
    for row in rows:
        row["findings"] = found.get(row["position"], [])
    rows.sort(
        key=lambda row: (row["position"] is None, row["position"] or 0, str(row["left_out"]).startswith(_TRAIN_ONLY))
    )
    return [[_plain(row.get(name)) for name in COLUMNS] for row in rows]


def _why_empty(measured: SampleMetrics) -> str | None:
    """Why a joined sample has no comparable token; None if it has one."""
    if measured.removed:
        return "removed"
    if measured.n_tokens:
        return None
    if not measured.response_length:
        return "no-response"
    return "masked" if measured.masked == measured.response_length else "no-log-probs"


def _of_rollout(compared: Comparison, position: int) -> dict[str, Any]:
    source = compared.rollout_dump.samples[position]
    reward = source.get("reward")
    status = source.get("status")
    value = None if isinstance(reward, dict) else number(reward)
    return {
        "position": position,
        "index": whole_number(source.get("index")),
        "group": whole_number(source.get("group_index")),
        "status": None if status is None else str(getattr(status, "value", status)),
        "response_length": whole_number(source.get("response_length")),
        "reward": value,
        "reward_text": _shortened(reward) if value is None and reward is not None else None,
    }


def _advantages(compared: Comparison) -> list[float | None]:
    """Mean advantage over the tokens that are trained, per pair; None without one."""
    table = compared.table
    means: list[float | None] = []
    for i, pair in enumerate(compared.joined.pairs):
        values = pair.train.get("advantages")
        mask = table.mask[table.tokens_of(i)]
        if not isinstance(values, torch.Tensor) or values.dim() != 1 or len(values) != len(mask):
            means.append(None)
            continue
        usable = values.float()[mask & values.isfinite()]
        means.append(float(usable.mean()) if len(usable) else None)
    return means


def _shortened(value: Any, limit: int = 80) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else f"{text[:limit]}…"


def _plain(value: Any) -> Any:
    """As JSON has it: what is not finite has no number there, and six digits are enough for a table."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
