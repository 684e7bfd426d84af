"""Put the parts of all ranks together again. Pure: what arrived in, whole rollout_data per data-parallel rank out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime_instrument._dump.assembly import DataRank, Sink
from slime_instrument._dump.packing import Flats, Ref
from slime_instrument._dump.shard import Manifest

__all__ = ["Part", "Restorer", "Shard", "restore"]


@dataclass(frozen=True)
class Part:
    """One rank's contribution, arrived as a whole."""

    manifest: Manifest
    flats: Flats


@dataclass(frozen=True)
class Shard:
    """One data-parallel rank's samples with every field whole. ``rank`` is the global rank of its CP rank 0."""

    rank: int
    data_rank: int
    rollout_data: dict[str, Any]
    provenance: dict[str, Any]


class Restorer:
    """Takes the manifests of all ranks first, then each rank's bytes as they come, through its :meth:`sink`.

    ``cp``: context-parallel size. Raises :class:`~slime_instrument._errors.DumpError` where the manifests do not make a
    whole.
    """

    def __init__(self, manifests: Sequence[Manifest], cp: int, cp_fields: Sequence[str]) -> None:
        by_data_rank: dict[int, dict[int, Manifest]] = {}
        for manifest in manifests:
            by_data_rank.setdefault(manifest.data_rank, {})[manifest.context_rank] = manifest
        self._data_ranks = {rank: DataRank(by_data_rank[rank], cp, cp_fields) for rank in sorted(by_data_rank)}

    def sink(self, manifest: Manifest) -> Sink:
        return self._data_ranks[manifest.data_rank].sink(manifest.context_rank)

    def shards(self) -> list[Shard]:
        """Every data-parallel rank's samples, in its order; call it when all sinks are full."""
        shards = []
        for data_rank, parts in self._data_ranks.items():
            rollout_data = {**parts.common(_with_tensors), **parts.fields()}
            shards.append(Shard(parts.head.rank, data_rank, rollout_data, parts.head.provenance))
        return shards


def restore(parts: Sequence[Part], cp: int, cp_fields: Sequence[str]) -> list[Shard]:
    """Group ``parts`` by data-parallel rank, in its order, and restore each. ``cp``: context-parallel size."""
    restorer = Restorer([part.manifest for part in parts], cp, cp_fields)
    for part in parts:
        sink = restorer.sink(part.manifest)
        for piece in part.flats.in_bytes():
            sink.feed(piece)
        sink.finish()
    return restorer.shards()


def _with_tensors(value: Any, flats: Flats) -> Any:
    if isinstance(value, Ref):
        return flats.tensor(value)
    if isinstance(value, dict):
        return {key: _with_tensors(item, flats) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if value and type(value[0]) is not Ref and not any(isinstance(item, _NESTED) for item in value):
            return value
        return type(value)(_with_tensors(item, flats) for item in value)
    return value


_NESTED: tuple[type, ...] = (Ref, dict, list, tuple)
