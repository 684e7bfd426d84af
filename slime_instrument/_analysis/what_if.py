"""What corrections of the mismatch would do to the tokens of a dump: how much they drop, clip and keep."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import torch

from slime_instrument._analysis.corrections import Batch, Outcome, Policy
from slime_instrument._analysis.drift import turns
from slime_instrument._analysis.pair import ReadPair
from slime_instrument._analysis.table import TOKEN_KINDS, TokenTable, tabulate
from slime_instrument._format.values import length_of, number

_MOST_VALUES = 6  # rewards with more different values than this are shown in quarters
_MOST_TURNS = 4  # later turns are one group
_RECORDED = (
    "n_tokens", "tokens_dropped", "tokens_clipped", "tokens_not_finite", "n_sequences", "sequences_dropped",
    "mean_weight", "ess", "advantage_kept",
)  # fmt: skip


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Tally:
    """Sums over the tokens of a group; they add up.

    Attributes:
        n_tokens: tokens that the loss counts.
        tokens_dropped: of these, how many the correction takes out or gives weight 0.
        tokens_clipped: how many it gives the weight of a bound.
        tokens_not_finite: how many get a weight that is NaN or infinite: the loss would be, too.
        n_sequences, sequences_dropped: sequences with a token in the group, and those with none left in it.
        weights, squares: Σw and Σw² over the tokens.
        signal, signal_kept: Σ|A| and Σ|A·w|; None without advantages.
    """

    n_tokens: int = 0
    tokens_dropped: int = 0
    tokens_clipped: int = 0
    tokens_not_finite: int = 0
    n_sequences: int = 0
    sequences_dropped: int = 0
    weights: float = 0.0
    squares: float = 0.0
    signal: float | None = None
    signal_kept: float | None = None

    def __add__(self, other: Tally) -> Tally:
        columns = zip(astuple(self), astuple(other), strict=True)
        added: list[Any] = [None if one is None or two is None else one + two for one, two in columns]
        return Tally(*added)

    @property
    def mean_weight(self) -> float | None:
        """Mean weight, 0 for what is dropped; None without tokens or with weights that are not finite."""
        return _finite(self.weights / self.n_tokens) if self.n_tokens else None

    @property
    def ess(self) -> float | None:
        """(Σw)² / (N Σw²); None where no token has a weight."""
        return _finite(self.weights**2 / (self.n_tokens * self.squares)) if self.squares else None

    @property
    def advantage_kept(self) -> float | None:
        """Σ|A·w| / Σ|A|; None without advantages, or where all are 0. Above 1 where weights are on average."""
        return _finite(self.signal_kept / self.signal) if self.signal and self.signal_kept is not None else None

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _RECORDED}


@dataclass(frozen=True)
class Groups:
    """Groups that each token is in one of.

    Attributes:
        names: of the groups.
        index: each token's group, int64, shape ``(N,)``.
    """

    names: tuple[str, ...]
    index: torch.Tensor

    def tallies(self, batch: Batch, outcome: Outcome) -> dict[str, Tally]:
        """What a policy does to the tokens of each group that the loss counts, in the order of the groups' names;
        groups without a token are not there."""
        mask, n_groups, n_sequences = batch.mask, len(self.names), len(batch.lengths)
        group, kept = self.index[mask], outcome.kept[mask]
        weight = outcome.effective[mask].double()
        # Per group and sequence: whether a token is there, and whether one is left.
        cells = group * n_sequences + batch.spread(torch.arange(n_sequences))[mask]
        there = torch.zeros(n_groups * n_sequences, dtype=torch.bool)
        left = there.clone()
        there[cells] = True
        left[cells[kept]] = True
        there, left = there.reshape(n_groups, -1), left.reshape(n_groups, -1)
        columns = {
            "n_tokens": torch.bincount(group, minlength=n_groups),
            "tokens_dropped": torch.bincount(group[~kept], minlength=n_groups),
            "tokens_clipped": torch.bincount(group[outcome.clipped[mask]], minlength=n_groups),
            "tokens_not_finite": torch.bincount(group[~weight.isfinite()], minlength=n_groups),
            "n_sequences": there.sum(1),
            "sequences_dropped": (there & ~left).sum(1),
            "weights": torch.bincount(group, weights=weight, minlength=n_groups),
            "squares": torch.bincount(group, weights=weight * weight, minlength=n_groups),
        }
        if batch.advantages is not None:
            signal = batch.advantages[mask].double().abs()
            columns["signal"] = torch.bincount(group, weights=signal, minlength=n_groups)
            columns["signal_kept"] = torch.bincount(group, weights=signal * weight.abs(), minlength=n_groups)
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        each = [Tally(**dict(zip(columns, row, strict=True))) for row in rows]
        return {name: tally for name, tally in zip(self.names, each, strict=True) if tally.n_tokens}


@dataclass(frozen=True)
class Rollout:
    """The tokens of one rollout, and the groups that they fall into.

    Attributes:
        rollout_id: which rollout.
        batch: the tokens.
        groups: by what -> the groups.
        left_out: tokens of the loss that lack a value on one side.
    """

    rollout_id: int | None
    batch: Batch
    groups: Mapping[str, Groups]
    left_out: int


@dataclass(frozen=True)
class Effect:
    """What one policy does.

    Attributes:
        policy: the policy.
        total: over all rollouts.
        splits: by what (``advantage``, ``reward``, ``turn``, ``length``) -> name of the group -> its tally.
        rollouts: for each rollout its id, its tally, and what the framework would have logged.
    """

    policy: Policy
    total: Tally
    splits: Mapping[str, Mapping[str, Tally]]
    rollouts: tuple[tuple[int | None, Tally, Mapping[str, float]], ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.policy.name,
            "framework": self.policy.framework,
            "parameters": dict(self.policy.parameters),
            "on_by_default": self.policy.on_by_default,
            **self.total.as_dict(),
            "splits": {
                by: [{"group": name, **tally.as_dict()} for name, tally in groups.items()]
                for by, groups in self.splits.items()
            },
            "rollouts": [
                {
                    "rollout_id": rollout_id,
                    **tally.as_dict(),
                    "reported": {name: _finite(value) for name, value in reported.items()},
                }
                for rollout_id, tally, reported in self.rollouts
            ],
        }


@dataclass(frozen=True)
class WhatIf:
    """Result of :func:`what_if`.

    Attributes:
        effects: one for each policy that could be tried, in the order given.
        skipped: policies that could not, and why.
        left_out: tokens of the loss that lack a value on one side, over all rollouts.
    """

    effects: tuple[Effect, ...]
    skipped: Mapping[str, str] = field(default_factory=dict)
    left_out: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "policies": [one.as_dict() for one in self.effects],
            "skipped": [{"name": name, "reason": reason} for name, reason in self.skipped.items()],
            "tokens_left_out": self.left_out,
        }


def what_if(rollouts: Iterable[Rollout], policies: Sequence[Policy]) -> WhatIf:
    """Try policies on rollouts. One rollout is held at a time where ``rollouts`` makes them one by one."""
    tried: list[list[tuple[int | None, Tally, Mapping[str, float]]]] = [[] for _ in policies]
    splits: list[dict[str, dict[str, Tally]]] = [{} for _ in policies]
    without: list[int | None] = []
    left_out = 0
    for rollout in rollouts:
        batch = rollout.batch
        left_out += rollout.left_out
        if batch.advantages is None:
            without.append(rollout.rollout_id)
        everything = Groups(("",), torch.zeros(len(batch.mask), dtype=torch.int64))
        for policy, results, parts in zip(policies, tried, splits, strict=True):
            if policy.needs_advantages and batch.advantages is None:
                continue
            outcome = policy.apply(batch)
            tally = everything.tallies(batch, outcome).get("", Tally())
            results.append((rollout.rollout_id, tally, outcome.reported))
            for by, groups in rollout.groups.items():
                known = parts.setdefault(by, {})
                for name, part in groups.tallies(batch, outcome).items():
                    known[name] = known[name] + part if name in known else part
    effects = tuple(
        Effect(
            policy,
            functools.reduce(operator.add, (tally for _, tally, _ in results)),
            {by: _in_order(groups) for by, groups in parts.items()},
            tuple(results),
        )
        for policy, results, parts in zip(policies, tried, splits, strict=True)
        if results
    )
    reason = f"needs advantages, which the train dump of {_named(without)} lacks"
    return WhatIf(effects, {one.name: reason for one in policies if one.needs_advantages and without}, left_out)


def _named(ids: Sequence[int | None]) -> str:
    shown = ", ".join(f"rollout {one}" if one is not None else "an unknown rollout" for one in ids[:3])
    return shown if len(ids) <= 3 else f"{shown} and {len(ids) - 3} more"


def _in_order(groups: Mapping[str, Tally]) -> dict[str, Tally]:
    """Groups of later rollouts come where their names belong. Names sort by the numbers that they begin with."""

    def key(name: str) -> tuple[float, str]:
        try:
            return number(float(name.split(" ")[0])) or 0.0, name
        except ValueError:
            return 0.0, ""

    return dict(sorted(groups.items(), key=lambda item: key(item[0])))


def rollout_of(pair: ReadPair) -> Rollout:
    """The tokens of a pair of dumps as a batch, with the groups that effects are split by."""
    table = tabulate(pair.joined.pairs)
    batch = batch_of(table)
    groups: dict[str, Groups] = {}
    if batch.advantages is not None:
        names = ("negative", "zero", "positive", "not a number")
        groups["advantage"] = Groups(names, batch.advantages.sign().nan_to_num(nan=2.0).long() + 1)
    rewards = _rewards(pair)
    if rewards is not None:
        groups["reward"] = _by_value(batch, rewards)
    last = _MOST_TURNS - 1
    turn = turns(batch.mask, batch.lengths).clamp(0, last)
    groups["turn"] = Groups((*map(str, range(last)), f"{last} and later"), turn)
    if len(batch.lengths):
        groups["length"] = _quarters(batch, batch.lengths.double())
    counted = table.mask & ~table.removed.repeat_interleave(table.lengths)
    return Rollout(pair.rollout_id, batch, groups, int((counted & ~batch.mask).sum()))


def batch_of(table: TokenTable) -> Batch:
    """The table's tokens as frameworks would see them: values that are not finite stay as they are. Where a side has no
    value at all the token does not count."""
    absent = table.kind == TOKEN_KINDS.index("missing")
    counted = table.mask & ~absent & (table.kind != TOKEN_KINDS.index("removed"))
    nothing = absent | (~table.mask & (table.train.isnan() | table.rollout.isnan()))
    return Batch(
        train=table.train.masked_fill(nothing, 0.0),
        rollout=table.rollout.masked_fill(nothing, 0.0),
        mask=counted,
        lengths=table.lengths,
        advantages=_advantages(table),
    )


def _advantages(table: TokenTable) -> torch.Tensor | None:
    found = []
    for pair, length in zip(table.pairs, table.lengths.tolist(), strict=True):
        value = pair.train.get("advantages")
        if not isinstance(value, torch.Tensor) or value.dim() != 1 or length_of(value) != length or value.is_complex():
            return None
        found.append(value.detach().float())
    return torch.cat(found) if found else None


def _rewards(pair: ReadPair) -> torch.Tensor | None:
    """Each sequence's reward before any normalisation, shape ``(S,)``; None where one has none."""
    raw = pair.train.whole_batch.get("raw_reward")
    rewards = []
    for one in pair.joined.pairs:
        value = number(one.rollout.get("reward"))
        if value is None and isinstance(raw, (list, tuple, torch.Tensor)) and one.position < len(raw):
            value = number(raw[one.position])
        if value is None:
            return None
        rewards.append(value)
    return torch.tensor(rewards, dtype=torch.float64) if rewards else None


def _by_value(batch: Batch, values: torch.Tensor) -> Groups:
    """By each sequence's value, where there are few different ones, else in quarters."""
    known = torch.tensor(sorted(set(values.tolist())), dtype=values.dtype)
    if len(known) > _MOST_VALUES or bool(values.isnan().any()):
        return _quarters(batch, values)
    return Groups(tuple(f"{value:g}" for value in known.tolist()), batch.spread(torch.searchsorted(known, values)))


def _quarters(batch: Batch, values: torch.Tensor) -> Groups:
    """Four groups of about as many sequences each; fewer where values repeat."""
    places = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
    limits = sorted(set(values.nan_to_num(nan=torch.inf).quantile(places).tolist()))
    if len(limits) == 1:
        return Groups((f"{limits[0]:g}",), batch.spread(torch.zeros(len(values), dtype=torch.int64)))
    names = tuple(f"{low:g} to {high:g}" for low, high in itertools.pairwise(limits))
    return Groups(names, batch.spread(torch.bucketize(values, torch.tensor(limits[1:-1], dtype=values.dtype))))
