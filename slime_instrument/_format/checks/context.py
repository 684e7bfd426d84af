"""What the checks of a v2 dump look at: the payload with its parts taken out once, and never trusted."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from slime_instrument._format.checks.values import as_list, whole_number
from slime_instrument._format.records import RolloutDump
from slime_instrument._format.schema import CONTEXT_PARALLEL_FIELDS, GROUP_ID_FIELDS, PROVENANCE

__all__ = ["V2Dump"]


@dataclass(frozen=True)
class V2Dump:
    """A v2 payload under examination.

    Attributes:
        payload: the top level as loaded.
        rollout: the rollout dump to compare with, if one was given.
        samples: the entries of ``samples`` that are dicts, as (position in the file, sample).
        shards: the entries of ``dp_shards`` that are dicts, as (position in the file, shard).
    """

    payload: dict[str, Any]
    rollout: RolloutDump | None = None
    samples: list[tuple[int, dict[str, Any]]] = field(init=False)
    shards: list[tuple[int, dict[str, Any]]] = field(init=False)

    def __post_init__(self) -> None:
        for name, key in (("samples", "samples"), ("shards", "dp_shards")):
            items = self.payload.get(key)
            pairs = list(enumerate(items)) if isinstance(items, list) else []
            object.__setattr__(self, name, [(i, item) for i, item in pairs if isinstance(item, dict)])

    @property
    def positions(self) -> list[int | None]:
        """Each sample's ``rollout_position``; None where it has none."""
        return [whole_number(sample.get("rollout_position")) for _, sample in self.samples]

    @property
    def raw_reward(self) -> list[Any] | None:
        """Rewards of the whole rollout batch, by rollout position."""
        return as_list(self.payload.get("raw_reward"))

    def has_provenance(self) -> bool:
        """Whether this package wrote the file."""
        return any(isinstance(shard.get(PROVENANCE), dict) for _, shard in self.shards)

    def response_fields(self) -> list[str]:
        """Fields with one value per response token: the known ones, and what the provenance adds to them."""
        names = dict.fromkeys(CONTEXT_PARALLEL_FIELDS)
        for _, shard in self.shards:
            provenance = shard.get(PROVENANCE)
            if isinstance(provenance, dict) and isinstance(provenance.get("fields"), dict):
                names.update(dict.fromkeys(str(name) for name in provenance["fields"]))
        return list(names)

    def group_of(self, position: int, sample: dict[str, Any]) -> Any:
        """Id of the execution that a sample came from; unique to the sample where the release has no such id."""
        for name in GROUP_ID_FIELDS:
            group = whole_number(sample.get(name))
            if group is not None:
                return group
        return ("sample", position)

    def has_groups(self) -> bool:
        """Whether the samples carry the ids that ``global_batch_sizes`` counts."""
        return any(name in sample for _, sample in self.samples for name in GROUP_ID_FIELDS)
