"""Are the parts of a v2 file there, and of the right type?"""

from __future__ import annotations

from array import array
from typing import Any

import torch

from slime_instrument._format.checks.context import V2Dump
from slime_instrument._format.checks.values import brief, holds_whole_numbers, is_whole_number, whole_number
from slime_instrument._format.findings import Findings
from slime_instrument._format.schema import FORMAT_VERSION, REQUIRED_SAMPLE_FIELDS

__all__ = ["check_field_coverage", "check_sample_types", "check_top_level"]


def check_top_level(dump: V2Dump, found: Findings) -> None:
    """Keys of the file and their types; samples and shards are lists of dicts."""
    payload = dump.payload
    version = payload.get("format_version")
    if whole_number(version) != FORMAT_VERSION:
        found.error(
            "structure", f"format_version is {brief(version)}, expected {FORMAT_VERSION}", field="format_version"
        )
    for key in ("rollout_id", "rank"):
        if not is_whole_number(payload.get(key)):
            found.error("structure", f"{key} is {_describe(payload, key)}, expected a whole number", field=key)
    for key in ("samples", "dp_shards"):
        items = payload.get(key)
        if not isinstance(items, list):
            found.error("structure", f"{key} is {_describe(payload, key)}, expected a list of dicts", field=key)
            continue
        for i, item in enumerate(items):
            if not isinstance(item, dict):
                found.error(
                    "structure",
                    f"{key}[{i}] is a {type(item).__name__}, expected a dict",
                    sample=i if key == "samples" else None,
                    field=key,
                )
    if isinstance(payload.get("dp_shards"), list) and not payload["dp_shards"]:
        found.error("structure", "dp_shards is empty, expected one entry per data-parallel rank", field="dp_shards")
    if "raw_reward" in payload and payload["raw_reward"] is not None and dump.raw_reward is None:
        found.error("type", f"raw_reward is {_describe(payload, 'raw_reward')}, expected a list", field="raw_reward")


def check_sample_types(dump: V2Dump, found: Findings) -> None:
    """Required fields of each sample, and the types of those whose type is fixed."""
    response_fields = dump.response_fields()
    for i, sample in dump.samples:
        for name in REQUIRED_SAMPLE_FIELDS:
            if sample.get(name) is None:
                found.error("missing-field", f"sample {i} has no {name}", sample=i, field=name)
        for name in ("response_lengths", "total_lengths", "data_parallel_rank"):
            value = sample.get(name)
            if value is not None and (not is_whole_number(value) or int(value) < 0):
                message = f"sample {i}: {name} is {_describe(sample, name)}, expected a whole number of at least 0"
                found.error("type", message, sample=i, field=name)
        for name in ("rollout_position", "sample_index"):
            value = sample.get(name)
            if value is not None and not is_whole_number(value):
                message = f"sample {i}: {name} is {_describe(sample, name)}, expected a whole number"
                found.error("type", message, sample=i, field=name)
        tokens = sample.get("tokens")
        if tokens is not None and not holds_whole_numbers(tokens):
            message = f"sample {i}: tokens is {_describe(sample, 'tokens')}, expected one whole number per token"
            found.error("type", message, sample=i, field="tokens")
        for name in response_fields:
            value = sample.get(name)
            if value is not None and not _is_numbers(value):
                message = f"sample {i}: {name} is {_describe(sample, name)}, expected one number per response token"
                found.error("type", message, sample=i, field=name)


def check_field_coverage(dump: V2Dump, found: Findings) -> None:
    """A field that some samples have and others lack, so that nobody can tell absent from lost.

    A value of None counts as there: a text sample beside images has ``multimodal_train_inputs`` None.
    """
    response_fields = dump.response_fields()
    names = dict.fromkeys(name for _, sample in dump.samples for name in sample)
    for name in names:
        if name in REQUIRED_SAMPLE_FIELDS:
            continue
        without = [i for i, sample in dump.samples if name not in sample]
        if not without:
            continue
        have = len(dump.samples) - len(without)
        message = f"{name} is in {have} of {len(dump.samples)} samples; first without it: sample {without[0]}"
        report = found.error if name in response_fields else found.warning
        report("uneven-field", message, sample=without[0], field=name)


def _is_numbers(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() >= 1 and value.is_floating_point()
    if isinstance(value, (list, tuple, array)):
        return all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in value)
    return False


def _describe(holder: dict[str, Any], key: str) -> str:
    if key not in holder:
        return "missing"
    value = holder[key]
    if isinstance(value, torch.Tensor):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} with shape {tuple(value.shape)}"
    if isinstance(value, (int, float, bool, type(None))):
        return brief(value)
    if isinstance(value, str):
        return f"the string {value[:40]!r}"
    return f"a {'list' if isinstance(value, array) else type(value).__name__}"
