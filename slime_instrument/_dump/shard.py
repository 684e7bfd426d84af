"""What one rank contributes to the dump. Pure: rollout_data and a topology in, a description and tensors out.

Context-parallel rank 0 contributes everything of its data-parallel shard; the other context-parallel ranks only their
parts of the sharded fields.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from slime_instrument._dump.packing import Packer, StreamKey
from slime_instrument._dump.plain import Converted, make_plain
from slime_instrument._dump.topology import Topology
from slime_instrument._dump.zigzag import shard_lengths
from slime_instrument._errors import DumpError

__all__ = ["COMMON", "Contribution", "Manifest", "ShardedField", "contribute"]

COMMON = ""
"""Section of the tensors that every context-parallel rank has alike."""


@dataclass(frozen=True)
class ShardedField:
    """One response-level field as this rank holds it: ``lengths`` are first dimensions, ``tail`` the other ones.

    ``full``: the rank holds whole responses (up to v0.2.1 slime leaves teacher log-probs unsliced). None where this
    rank's lengths fit both readings; another rank then decides.
    """

    dtype: torch.dtype
    tail: tuple[int, ...]
    lengths: tuple[int, ...]
    full: bool | None


@dataclass(frozen=True)
class Manifest:
    """What the bytes of a contribution mean. Small; travels before them."""

    rank: int
    data_rank: int
    context_rank: int
    sizes: dict[StreamKey, int]
    sharded: dict[str, ShardedField]
    common: dict[str, Any] | None
    provenance: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Contribution:
    manifest: Manifest
    packer: Packer


def contribute(
    rollout_data: dict[str, Any],
    topology: Topology,
    cp_fields: Sequence[str],
    *,
    padded: Sequence[int] | None = None,
    provenance: dict[str, Any] | None = None,
) -> Contribution:
    """Describe and queue this rank's part. Copies nothing yet.

    ``cp_fields``: names of the response-level fields that context parallelism shards; ``padded``: per sample the
    length that chunks are cut from, where it is not the total length. Raises :class:`DumpError` naming the field,
    the sample and the numbers where rollout_data does not fit together.
    """
    totals = [int(length) for length in rollout_data["total_lengths"]]
    responses = [int(length) for length in rollout_data["response_lengths"]]
    if len(totals) != len(responses):
        raise DumpError(f"total_lengths has {len(totals)} samples, response_lengths {len(responses)}")
    cp, cp_rank = topology.context_parallel, topology.context_rank
    expected = shard_lengths(totals, responses, cp, cp_rank, padded)
    packer, sharded = Packer(), {}
    for name in cp_fields:
        values = rollout_data.get(name)
        if values is None or not any(torch.is_tensor(value) for value in values):
            continue
        sharded[name] = _sharded(name, values, expected, responses)
        packer.add_all(name, values)
    common, report = None, Converted()
    if cp_rank == 0:
        rest = {
            key: value
            for key, value in rollout_data.items()
            if key not in sharded and not _is_unset(key, value, cp_fields)
        }
        common = {
            key: make_plain(value, lambda t: packer.add(COMMON, t), report.at(key)) for key, value in rest.items()
        }
    extra = {**(provenance or {}), **({"converted": report.as_dict()} if report else {})}
    manifest = Manifest(topology.rank, topology.data_rank, cp_rank, dict(packer.sizes), sharded, common, extra)
    return Contribution(manifest, packer)


def _is_unset(key: str, value: Any, cp_fields: Sequence[str]) -> bool:
    """A response-level field that is None is one that was not computed; the file leaves it out, as slime's own does."""
    return value is None and key in cp_fields


def _sharded(name: str, values: Any, expected: list[int], responses: list[int]) -> ShardedField:
    if not isinstance(values, (list, tuple)) or len(values) != len(expected):
        found = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
        raise DumpError(f"{name} must hold one tensor per sample: expected {len(expected)}, found {found}")
    for index, value in enumerate(values):
        if not torch.is_tensor(value) or value.dim() == 0:
            raise DumpError(f"{name} of local sample {index} must be a tensor, found {type(value).__name__}")
    kinds = {(value.dtype, tuple(value.shape[1:])) for value in values}
    if len(kinds) > 1:
        raise DumpError(f"{name} mixes {sorted(str(kind) for kind in kinds)} among its samples")
    lengths = tuple(value.size(0) for value in values)
    as_shard, as_full = lengths == tuple(expected), lengths == tuple(responses)
    if not as_shard and not as_full:
        index = next(i for i, length in enumerate(lengths) if length != expected[i])
        raise DumpError(
            f"{name} of local sample {index} holds {lengths[index]} values; "
            f"expected {expected[index]} (response length {responses[index]})"
        )
    dtype, tail = kinds.pop()
    return ShardedField(dtype, tail, lengths, None if as_shard and as_full else as_full)
