"""What the validator looks at (a payload with its parts taken out once) and what it finds (one record per fault)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from slime_instrument._format.dumps import Provenance, RolloutDump
from slime_instrument._format.schedule import Schedule, schedule_of
from slime_instrument._format.schema import CONTEXT_PARALLEL_FIELDS, GROUP_ID_FIELDS
from slime_instrument._format.values import as_list, whole_number


@dataclass(frozen=True)
class Problem:
    """One fault.

    Attributes:
        code: a stable name of the kind of fault.
        message: what was expected and what was found, with the numbers.
        file: the file it is in.
        sample: position in the file's ``samples`` (in the columns of an old per-rank file), or None.
        field: the field, or None.
    """

    code: str
    message: str
    file: str
    sample: int | None = None
    field: str | None = None


class Problems:
    """Collects the problems of one file; the checks only ever add to it."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)
        self.errors: list[Problem] = []
        self.warnings: list[Problem] = []

    def error(self, code: str, message: str, *, sample: int | None = None, field: str | None = None) -> None:
        """Something that makes the dump wrong."""
        self.errors.append(Problem(code, message, self.file, sample, field))

    def warning(self, code: str, message: str, *, sample: int | None = None, field: str | None = None) -> None:
        """Something to know about a dump that can be right."""
        self.warnings.append(Problem(code, message, self.file, sample, field))


@dataclass
class ValidationReport:
    """All problems of one call, over every file of it."""

    errors: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)

    @property
    def valid(self) -> bool:
        """Whether no file has an error. Warnings do not count."""
        return not self.errors

    @property
    def unreadable(self) -> list[Problem]:
        """Those errors that are about files that could not be looked into at all."""
        return [problem for problem in self.errors if problem.code == "unreadable"]

    def add(self, found: Problems) -> None:
        """Take over the problems of one file."""
        self.errors += found.errors
        self.warnings += found.warnings

    def as_dict(self) -> dict[str, Any]:
        """What ``slime-instrument validate --json`` prints."""
        return {
            "valid": self.valid,
            "errors": [asdict(finding) for finding in self.errors],
            "warnings": [asdict(finding) for finding in self.warnings],
        }


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

    @property
    def provenance(self) -> Provenance:
        """What slime_instrument wrote about the run; empty in slime's own files."""
        return Provenance.of_dump([shard for _, shard in self.shards])

    def response_fields(self) -> list[str]:
        """Fields with one value per response token: the known ones, and what the provenance adds to them."""
        names = dict.fromkeys(CONTEXT_PARALLEL_FIELDS)
        for _, shard in self.shards:
            names.update(dict.fromkeys(Provenance.of(shard).fields))
        return list(names)

    @property
    def batch_size(self) -> int | None:
        """Samples in the rollout batch, by its rewards or by the rollout dump; None where neither is there."""
        rewards = self.raw_reward
        if rewards is not None:
            return len(rewards)
        return len(self.rollout.samples) if self.rollout is not None else None

    @cached_property
    def schedule(self) -> Schedule:
        """Which positions of the batch are missing, and which were never scheduled."""
        rewards = self.raw_reward
        return schedule_of(
            [sample for _, sample in self.samples],
            [shard for _, shard in self.shards],
            positions=self.positions,
            batch=self.batch_size,
            rewards=None if rewards is None else len(rewards),
        )

    def has_groups(self) -> bool:
        """Whether the samples carry the ids that ``global_batch_sizes`` counts."""
        return any(name in sample for _, sample in self.samples for name in GROUP_ID_FIELDS)
