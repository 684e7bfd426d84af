"""Both sides of one rollout, read and joined: where every analysis begins. And which of its samples belong together:
those of one prompt, and those of one execution."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from slime_instrument._format.dumps import Provenance, RolloutDump, TrainDump, read_rollout_dump, read_train_dump
from slime_instrument._format.join import Join, join
from slime_instrument._format.pairs import FilePair
from slime_instrument._format.values import whole_number

PathLike = str | os.PathLike[str]

GROUPED_ESTIMATORS = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"})
"""Estimators for which slime subtracts a baseline from the rewards of a group."""


@dataclass(frozen=True)
class ReadPair:
    """A rollout dump and its train dump.

    Attributes:
        rollout, train: the dumps; old per-rank files as the v2 dump that they convert to.
        joined: who belongs to whom.
        warnings: from the conversion.
    """

    rollout: RolloutDump
    train: TrainDump
    joined: Join
    warnings: tuple[str, ...] = ()

    @cached_property
    def provenance(self) -> Provenance:
        """What the train dump says about its run."""
        return self.train.provenance

    @property
    def arguments(self) -> Mapping[str, Any]:
        """slime's arguments as provenance records them; empty where it does not."""
        found = self.provenance.record.get("arguments")
        return found if isinstance(found, Mapping) else {}

    @property
    def rollout_id(self) -> int | None:
        """Of the train dump, else of the rollout dump."""
        return self.train.rollout_id if self.train.rollout_id is not None else self.rollout.rollout_id


def read_train(files: PathLike | Sequence[PathLike]) -> TrainDump:
    """A v2 file, or the old per-rank files of one rollout. Errors as of :func:`read_pair`."""
    if not isinstance(files, (str, os.PathLike)) and len(files) == 1:
        files = files[0]  # a single file is read lazily
    return read_train_dump(files)


def read_pair(pair: FilePair, *, allow_pickle: bool = False, compact: bool = True) -> ReadPair:
    """Read and join the files of one rollout.

    Args:
        pair: the files.
        allow_pickle: read rollout dumps with objects of arbitrary classes; this can run code from them.
        compact: give long lists of numbers as tensors.

    Raises:
        DumpFormatError: a file cannot be read or is of another kind, or per-rank files do not tell their layout.
        OSError: a file is missing or may not be read.
    """
    rollout = read_rollout_dump(pair.rollout, allow_pickle=allow_pickle, compact=compact)
    return joined_pair(rollout, read_train(pair.train))


def joined_pair(rollout: RolloutDump, train: TrainDump) -> ReadPair:
    """The same for dumps that are read already."""
    warnings: tuple[str, ...] = ()
    if train.kind == "train-rank":
        from slime_instrument._convert import convert_dump

        converted = convert_dump(train, rollout=rollout)
        train, warnings = converted.dump, tuple(converted.warnings)
    return ReadPair(rollout, train, join(rollout, train), warnings)


@dataclass(frozen=True)
class Baseline:
    """Over which samples slime takes the mean reward that it subtracts.

    slime cuts the batch into runs of ``n_samples_per_prompt`` samples if it has exactly as many as the arguments say;
    if not, the whole batch is one group.

    Attributes:
        groups: positions, by group.
        whole_batch: whether it is one group only because the number of samples is another one than expected.
    """

    groups: tuple[tuple[int, ...], ...]
    whole_batch: bool


def slimes_baseline(n_samples: int, arguments: Mapping[str, Any]) -> Baseline | None:
    """Groups as slime's own code forms them; None where the arguments are not known.

    Args:
        n_samples: samples that slime converted: those of the rollout dump.
        arguments: as provenance records them.
    """
    per_prompt = whole_number(arguments.get("n_samples_per_prompt"))
    prompts = whole_number(arguments.get("rollout_batch_size"))
    if not per_prompt or not prompts:
        return None
    if n_samples != per_prompt * prompts:
        return Baseline((tuple(range(n_samples)),), whole_batch=True)
    starts = range(0, n_samples, per_prompt)
    return Baseline(tuple(tuple(range(start, start + per_prompt)) for start in starts), whole_batch=False)


def prompt_groups(samples: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any] | None = None) -> list[list[int]]:
    """Positions by prompt: by ``group_index`` where every sample has one, else as slime cuts the batch, else by
    execution. Samples of one execution are never apart.

    Args:
        samples: of a rollout dump.
        arguments: as provenance records them, if known.
    """
    labels: list[Hashable] = [whole_number(sample.get("group_index")) for sample in samples]
    if any(label is None for label in labels):
        baseline = slimes_baseline(len(samples), arguments or {})
        if baseline is not None and not baseline.whole_batch:
            labels = [n for n, group in enumerate(baseline.groups) for _ in group]
        else:
            labels = [None] * len(samples)
    first: dict[Hashable, int] = {}
    parent = list(range(len(samples)))

    def root(position: int) -> int:
        while parent[position] != position:
            position = parent[position]
        return position

    for position, (label, execution) in enumerate(zip(labels, executions(samples), strict=True)):
        for key in (("group", label), ("execution", execution)):
            if key[1] is None:
                continue
            one, other = sorted((root(first.setdefault(key, position)), root(position)))
            parent[other] = one
    groups: dict[int, list[int]] = {}
    for position in range(len(samples)):
        groups.setdefault(root(position), []).append(position)
    return list(groups.values())


def executions(samples: Sequence[Mapping[str, Any]]) -> list[Hashable]:
    """Id of the execution that each rollout sample came from: ``rollout_id``, ``group_id``, else its own index; None
    for a sample without any, which is one of its own."""
    found: list[Hashable] = []
    for sample in samples:
        named = [(name, whole_number(sample.get(name))) for name in ("rollout_id", "group_id", "index")]
        found.append(next(((name, value) for name, value in named if value is not None), None))
    return found


def n_executions(samples: Sequence[Mapping[str, Any]]) -> int:
    """How many executions the samples are of."""
    ids = executions(samples)
    return len({one for one in ids if one is not None}) + ids.count(None)
