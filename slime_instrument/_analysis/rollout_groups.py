"""Which samples of a rollout belong together: those of one prompt, and those of one execution."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_instrument._format.values import whole_number

GROUPED_ESTIMATORS = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"})
"""Estimators for which slime subtracts a baseline from the rewards of a group."""


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
