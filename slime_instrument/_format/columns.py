"""The columns of old per-rank files: whether they can be converted at all, and in the form that the restorer takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slime_instrument._format.checks.values import as_ints, as_list, brief, holds_whole_numbers, is_whole_number
from slime_instrument._format.containers import unusable
from slime_instrument._format.records import RankData
from slime_instrument._format.schema import CONTEXT_PARALLEL_FIELDS, ID_COLUMNS

__all__ = ["padded_lengths", "refuse_malformed", "whole_fields"]

_LARGEST_RANK = 1 << 14  # layouts are tried one by one; no run of an old release was anywhere near


def refuse_malformed(ranks: Sequence[RankData]) -> None:
    """Refuse files whose columns are not what slime writes: what follows takes types and counts for granted.

    Raises:
        DumpFormatError: names the file, the column, what was expected and what was found.
    """
    for rank in ranks:
        trouble = _trouble(rank)
        if trouble is not None:
            raise unusable(rank.path, trouble, next_step="slime-instrument validate says more.")


def whole_fields(rank: RankData, common: set[str]) -> dict[str, Any]:
    """The rank's columns, with response-level values as tensors and the teacher's cut to the response.

    Args:
        rank: a file that :func:`refuse_malformed` lets pass.
        common: the response-level fields to keep.
    """
    data = {
        name: value
        for name, value in rank.rollout_data.items()
        if name not in CONTEXT_PARALLEL_FIELDS or name in common
    }
    for name in ("total_lengths", "response_lengths"):
        data[name] = as_ints(data[name])
    for name in ID_COLUMNS:
        if data.get(name) is not None:
            data[name] = as_list(data[name])
    for name in CONTEXT_PARALLEL_FIELDS:
        values = data.get(name)
        if not isinstance(values, (list, tuple)):
            continue
        tensors = [
            value if isinstance(value, torch.Tensor) or value is None else torch.tensor(value, dtype=torch.float32)
            for value in values
        ]
        if name == "teacher_log_probs":
            # Up to v0.2.1 slime does not slice them; some servers answer for the prompt too.
            lengths = zip(tensors, data["total_lengths"], data["response_lengths"], strict=True)
            tensors = [
                one[len(one) - response :] if one is not None and len(one) == total > response else one
                for one, total, response in lengths
            ]
        data[name] = tensors
    return data


def padded_lengths(data: Mapping[str, Any]) -> list[int] | None:
    """Per sample the length that chunks were cut from in the bshd layout (v0.2.2 to v0.3.0); None in any other."""
    return as_ints(data.get("max_seq_lens"))


def _trouble(rank: RankData) -> str | None:
    if not 0 <= rank.rank < _LARGEST_RANK:
        return f"is of rank {rank.rank}, expected one of 0 to {_LARGEST_RANK - 1}"
    data = rank.rollout_data
    totals, responses = as_ints(data.get("total_lengths")), as_ints(data.get("response_lengths"))
    if totals is None or responses is None or len(totals) != len(responses):
        return "has no lists total_lengths and response_lengths of whole numbers, one per sample"
    bad = next((i for i, pair in enumerate(zip(responses, totals, strict=True)) if not 0 <= pair[0] <= pair[1]), None)
    if bad is not None:
        return f"states {responses[bad]} response tokens of {totals[bad]} in all for sample {bad}"
    n = len(responses)
    tokens = as_list(data.get("tokens"))
    if tokens is None or len(tokens) != n or not all(map(holds_whole_numbers, tokens)):
        return f"has no list tokens with whole numbers for each of {n} samples"
    for name in (*ID_COLUMNS, "max_seq_lens"):
        column = data.get(name)
        if column is None:
            continue
        values = as_list(column)
        if values is None or len(values) != n or not all(one is None or is_whole_number(one) for one in values):
            return f"has {brief(column)} under {name}, expected a whole number for each of {n} samples"
    for name in CONTEXT_PARALLEL_FIELDS:
        column = data.get(name)
        if isinstance(column, (list, tuple)) and not all(one is None or _holds_numbers(one) for one in column):
            i = next(i for i, one in enumerate(column) if one is not None and not _holds_numbers(one))
            return f"has {brief(column[i])} under {name} of sample {i}, expected numbers"
        if column is not None and not isinstance(column, (list, tuple)):
            return f"has {brief(column)} under {name}, expected a list with one entry per sample"
    return None


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 1 and not value.is_complex()
    return isinstance(value, (list, tuple)) and all(type(item) in (int, float) for item in value)
