"""Two values bit for bit, two dumps in words. Pure: loaded files in, a list of differences out."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from slime_instrument._format.schema import CONTEXT_PARALLEL_FIELDS, FORGOTTEN_CONTEXT_PARALLEL_FIELDS, PROVENANCE

#: Fields that the model's own arithmetic is in. All others must not depend on the layout at all.
MODEL_FIELDS = ("log_probs", "ref_log_probs", "entropy", "ref_entropy", "teacher_entropy", "kl", "opd_reverse_kl")
#: Fields that may depend on it, by recipe.
ADVANTAGE_FIELDS = ("advantages", "returns")


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Where two trees of plain values and tensors are not the same bits. Lists and tuples are told apart."""
    if torch.is_tensor(one) and torch.is_tensor(other):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            yield f"{where}: {one.dtype} {tuple(one.shape)} against {other.dtype} {tuple(other.shape)}"
        elif not torch.equal(_bits(one), _bits(other)):
            changed = (_bits(one) != _bits(other)).view(one.numel(), -1).any(1)
            yield f"{where}: {int(changed.sum())} of {one.numel()} values differ"
    elif type(one) is not type(other):
        yield f"{where}: {type(one).__name__} against {type(other).__name__}"
    elif isinstance(one, Mapping):
        for key in [*one, *(key for key in other if key not in one)]:
            if key in one and key in other:
                yield from differences(one[key], other[key], f"{where}.{key}" if where else str(key))
            else:
                yield f"{where}.{key}: only in the {'first' if key in one else 'second'}"
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield f"{where}: {len(one)} entries against {len(other)}"
        else:
            for index, (left, right) in enumerate(zip(one, other, strict=True)):
                yield from differences(left, right, f"{where}[{index}]")
    elif isinstance(one, float):
        if struct.pack("d", one) != struct.pack("d", other):
            yield f"{where}: {one!r} against {other!r}"
    elif one != other:
        yield f"{where}: {one!r} against {other!r}"


def from_native(ours: Mapping[str, Any], native: Mapping[str, Any], cp: int) -> Iterator[str]:
    """Where our file is not slime's own, provenance aside and but for the two deliberate differences: fields that
    slime's list of sharded ones forgot are whole here, and a token that no rank owns is NaN."""
    without = {
        **ours,
        "dp_shards": [{k: v for k, v in shard.items() if k != PROVENANCE} for shard in ours["dp_shards"]],
    }
    theirs = dict(native)
    if cp > 1:
        samples = []
        for mine, sample in zip(ours["samples"], native["samples"], strict=False):
            sample = dict(sample)
            for name in FORGOTTEN_CONTEXT_PARALLEL_FIELDS:
                if name in sample and name in mine and _holds_part(mine[name], sample[name]):
                    sample[name] = mine[name]
            for name in CONTEXT_PARALLEL_FIELDS:
                if name in sample and sample[name].numel() and no_prompt(sample) and sample[name][0] == 0:
                    sample[name] = sample[name].clone()
                    sample[name][0] = float("nan")
            samples.append(sample)
        theirs["samples"] = samples
    yield from differences(without, theirs)


def from_single(
    ours: Mapping[str, Any],
    single: Mapping[str, Any],
    *,
    tolerance: float,
    exact: bool,
    cp: int,
    apart: Sequence[str] = (),
) -> tuple[list[str], float]:
    """Where a layout's file is not the single process's, and the largest difference of a log-prob. Fields named in
    ``apart`` are not compared."""
    found: list[str] = []
    largest = 0.0
    near = MODEL_FIELDS if exact else MODEL_FIELDS + ADVANTAGE_FIELDS
    mine, theirs = (_by_position(payload["samples"]) for payload in (ours, single))
    if mine.keys() != theirs.keys():
        return [f"samples at {sorted(mine)} against {sorted(theirs)}"], math.inf
    for position, sample in mine.items():
        expected, where = theirs[position], f"sample {position}"
        for key in [*sample, *(key for key in expected if key not in sample)]:
            if key == "data_parallel_rank" or key in apart:
                continue
            if key not in sample or key not in expected:
                found.append(f"{where}.{key}: only in {'this layout' if key in sample else 'the single process'}")
                continue
            value, reference = sample[key], expected[key]
            if key in CONTEXT_PARALLEL_FIELDS and cp > 1 and no_prompt(sample) and value.numel():
                if not math.isnan(value[0].item()):
                    found.append(f"{where}.{key}: a token that no rank owns has a value")
                value, reference = value[1:], reference[1:]
            if key not in near:
                found += differences(value, reference, f"{where}.{key}")
                continue
            if (value.dtype, value.shape) != (reference.dtype, reference.shape):
                found += differences(value, reference, f"{where}.{key}")
                continue
            difference = (value.double() - reference.double()).abs()
            worst = difference.max().item() if difference.numel() else 0.0
            # What is computed from several log-probs gathers the rounding of each.
            if not worst <= (tolerance if key == "log_probs" else 5 * tolerance):
                found.append(f"{where}.{key}: differs by {worst:.3g}")
            if key == "log_probs":
                largest = max(largest, worst)
    whole = {key: [p.get(key) for p in (ours, single)] for key in {*ours, *single} - {"samples", "dp_shards", "rank"}}
    for key, (left, right) in sorted(whole.items()):
        found += differences(left, right, key)
    return found, largest


def no_prompt(sample: Mapping[str, Any]) -> bool:
    return bool(sample["total_lengths"] == sample["response_lengths"])


def _by_position(samples: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    return {sample.get("rollout_position", index): sample for index, sample in enumerate(samples)}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else flat


def _holds_part(whole: torch.Tensor, part: torch.Tensor) -> bool:
    """Whether ``part`` is a subsequence of ``whole``, in order: one rank's shard of it."""
    values = iter(whole.tolist())
    return part.numel() <= whole.numel() and all(any(value == held for value in values) for held in part.tolist())
