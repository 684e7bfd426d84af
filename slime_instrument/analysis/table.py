"""All joined response tokens as flat tensors. Everything that is measured is measured on these.

``N`` counts the response tokens of all pairs one after another, ``S`` the pairs, ``M`` the comparable tokens: mask 1 on
the train side and a usable log-prob on both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from slime_instrument.analysis.arrays import integers, log_probs
from slime_instrument.analysis.join import Pair
from slime_instrument.files.checks.values import length_of, whole_number

__all__ = ["FILLER", "KINDS", "TokenTable", "tabulate"]

KINDS = ("comparable", "masked", "missing", "nan", "inf", "filler", "removed")
"""What a token is; its number in :attr:`TokenTable.kind`. A token that is several things is the first that applies,
in the order masked, missing, nan, inf, filler."""

FILLER = -1e30  # engines write the lowest float of their type for "no value"; no log-prob comes near it
_UNSEEN = float("nan")


@dataclass(frozen=True)
class TokenTable:
    """The tokens of all joined pairs.

    Attributes:
        pairs: the joined pairs, in the order of their tokens.
        lengths: response lengths, int64, shape ``(S,)``.
        rollout, train: log-probs, float32, shape ``(N,)``; what is missing is NaN.
        mask: loss mask of the train side, bool, shape ``(N,)``.
        rollout_mask: loss mask of the rollout side, bool, shape ``(N,)``; 1 where it has none.
        kind: index into :data:`KINDS`, uint8, shape ``(N,)``.
        removed: which pairs the rollout marked with remove_sample, bool, shape ``(S,)``.
        problems: what could not be used, one sentence each.
        misfits: pair -> log-probs of a length that is not the response's, by side; they take no part.
    """

    pairs: Sequence[Pair]
    lengths: torch.Tensor
    rollout: torch.Tensor
    train: torch.Tensor
    mask: torch.Tensor
    rollout_mask: torch.Tensor
    kind: torch.Tensor
    removed: torch.Tensor
    has_rollout_mask: torch.Tensor
    train_dtypes: frozenset[torch.dtype]
    problems: list[str] = field(default_factory=list)
    misfits: dict[int, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def starts(self) -> torch.Tensor:
        """First token of each pair, int64, shape ``(S,)``."""
        return self.lengths.cumsum(0) - self.lengths

    @cached_property
    def sample(self) -> torch.Tensor:
        """Pair of each token, int32, shape ``(N,)``."""
        return torch.arange(len(self.lengths), dtype=torch.int32).repeat_interleave(self.lengths)

    @cached_property
    def comparable(self) -> torch.Tensor:
        """Tokens that count, bool, shape ``(N,)``."""
        return self.kind == 0

    @cached_property
    def delta(self) -> torch.Tensor:
        """train - rollout of the comparable tokens, float64, shape ``(M,)``."""
        return self.train[self.comparable].double().sub_(self.rollout[self.comparable])

    @cached_property
    def sample_of_delta(self) -> torch.Tensor:
        """Pair of each comparable token, int64, shape ``(M,)``."""
        return self.sample[self.comparable].long()

    @cached_property
    def counts(self) -> torch.Tensor:
        """Comparable tokens of each pair, float64, shape ``(S,)``."""
        return torch.bincount(self.sample_of_delta, minlength=len(self.lengths)).double()

    def index_in_sample(self) -> torch.Tensor:
        """Response index of each token, int64, shape ``(N,)``."""
        return torch.arange(int(self.lengths.sum())) - self.starts.repeat_interleave(self.lengths)

    def tokens_of(self, pair: int) -> slice:
        """Where the tokens of one pair stand."""
        start = int(self.starts[pair])
        return slice(start, start + int(self.lengths[pair]))

    def per_sample_sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over the comparable tokens of each pair: shape ``(M,)`` in, ``(S,)`` out, float64."""
        return torch.bincount(self.sample_of_delta, weights=values, minlength=len(self.lengths))

    def excluded(self) -> dict[str, int]:
        """Tokens by the kind for which they do not count; ``removed`` counts samples."""
        counts = torch.bincount(self.kind.int(), minlength=len(KINDS)).tolist()
        excluded = {kind: int(counts[i]) for i, kind in enumerate(KINDS) if kind not in ("comparable", "removed")}
        return {**excluded, "removed": int(self.removed.sum())}


def tabulate(pairs: Sequence[Pair], *, train_field: str = "log_probs") -> TokenTable:
    """Lay the tokens of all pairs out flat.

    Args:
        pairs: joined samples.
        train_field: field of the train side to compare with ``rollout_log_probs``.
    """
    problems: list[str] = []
    theirs = _LogProbs("rollout", "rollout_log_probs", problems)
    ours = _LogProbs("train", train_field, problems)
    masks, rollout_masks = _Masks("train", "loss_masks", problems), _Masks("rollout", "loss_mask", problems)
    lengths: list[int] = []
    for pair in pairs:
        n = _response_length(pair)
        lengths.append(n)
        theirs.add(pair, pair.rollout.get("rollout_log_probs"), n)
        stored = pair.train.get(train_field)
        ours.add(pair, stored, n)
        if n and whole_number(pair.train.get("total_lengths")) == n and bool(ours.parts[-1][0].isnan()):
            ours.mark(0)  # without a prompt there is no logit that predicts the first token
        masks.add(pair, pair.train.get("loss_masks"), n)
        rollout_masks.add(pair, pair.rollout.get("loss_mask"), n)
    rollout, train, mask = theirs.flat(), ours.flat(), masks.flat()
    kind = _kinds(rollout, train, mask, theirs.missing() | ours.missing())
    length = torch.tensor(lengths, dtype=torch.int64)
    removed = torch.tensor([bool(pair.rollout.get("remove_sample")) for pair in pairs], dtype=torch.bool)
    if bool(removed.any()):
        kind[removed.repeat_interleave(length)] = KINDS.index("removed")
    return TokenTable(
        pairs=pairs,
        lengths=length,
        rollout=rollout,
        train=train,
        mask=mask,
        rollout_mask=rollout_masks.flat(),
        kind=kind,
        removed=removed,
        has_rollout_mask=torch.tensor(rollout_masks.present, dtype=torch.bool),
        train_dtypes=frozenset(ours.dtypes),
        problems=problems,
        misfits=ours.misfits,
    )


class _LogProbs:
    """The log-probs of one side, part by part."""

    def __init__(self, side: str, name: str, problems: list[str]) -> None:
        self.side, self.name, self.problems = side, name, problems
        self.parts: list[torch.Tensor] = []
        self.dtypes: set[torch.dtype] = set()
        self.misfits: dict[int, torch.Tensor] = {}
        self._gaps: dict[int, torch.Tensor] = {}

    def add(self, pair: Pair, value: Any, n: int) -> None:
        """Take the next part, which should have ``n`` values."""
        converted = log_probs(value)
        if isinstance(value, torch.Tensor):
            self.dtypes.add(value.dtype)
        if converted is not None and len(converted[0]) == n:
            self.parts.append(converted[0])
            if converted[1] is not None:
                self._gaps[len(self.parts) - 1] = converted[1]
            return
        if value is not None:
            found = f"{length_of(value)} values" if converted is not None else f"a {type(value).__name__}"
            self.problems.append(_problem(self.side, self.name, pair, found, n))
            if converted is not None:
                self.misfits[len(self.parts)] = converted[0]
        self.parts.append(torch.full((n,), _UNSEEN))
        self._gaps[len(self.parts) - 1] = torch.ones(n, dtype=torch.bool)

    def mark(self, token: int) -> None:
        """One token of the last part has no value, and cannot have one."""
        gap = self._gaps.setdefault(len(self.parts) - 1, torch.zeros(len(self.parts[-1]), dtype=torch.bool))
        gap[token] = True

    def flat(self) -> torch.Tensor:
        return torch.cat(self.parts) if self.parts else torch.empty(0)

    def missing(self) -> torch.Tensor:
        """Tokens without a value, bool, shape ``(N,)``."""
        missing = torch.zeros(sum(map(len, self.parts)), dtype=torch.bool)
        offset = 0
        for i, part in enumerate(self.parts):
            if i in self._gaps:
                missing[offset : offset + len(part)] = self._gaps[i]
            offset += len(part)
        return missing


class _Masks:
    """The loss masks of one side, part by part. A side without a mask trains on everything."""

    def __init__(self, side: str, name: str, problems: list[str]) -> None:
        self.side, self.name, self.problems = side, name, problems
        self.parts: list[torch.Tensor] = []
        self.present: list[bool] = []

    def add(self, pair: Pair, value: Any, n: int) -> None:
        """Take the next part, which should have ``n`` values."""
        numbers = value if isinstance(value, torch.Tensor) and value.dim() == 1 else integers(value)
        usable = numbers is not None and len(numbers) == n
        self.present.append(usable)
        if usable and numbers is not None:
            self.parts.append(numbers != 0)
            return
        if value is not None:
            length = length_of(value)
            found = f"{length} values" if length is not None else f"a {type(value).__name__}"
            self.problems.append(_problem(self.side, self.name, pair, found, n))
        self.parts.append(torch.ones(n, dtype=torch.bool))

    def flat(self) -> torch.Tensor:
        return torch.cat(self.parts) if self.parts else torch.empty(0, dtype=torch.bool)


def _problem(side: str, name: str, pair: Pair, found: str, n: int) -> str:
    return f"{side} sample at position {pair.position}: {name} has {found}, but the response has {n} tokens"


def _response_length(pair: Pair) -> int:
    for value in (pair.train.get("response_lengths"), pair.rollout.get("response_length")):
        number = whole_number(value)
        if number is not None and number >= 0:
            return number
    return length_of(pair.train.get("loss_masks")) or 0


def _kinds(rollout: torch.Tensor, train: torch.Tensor, mask: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
    """Number of the first kind that applies. Later assignments win, so they run from the last kind to the first."""
    kind = torch.zeros(len(mask), dtype=torch.uint8)
    kind[(rollout < FILLER) | (train < FILLER)] = KINDS.index("filler")
    kind[rollout.isinf() | train.isinf()] = KINDS.index("inf")
    kind[rollout.isnan() | train.isnan()] = KINDS.index("nan")
    kind[missing] = KINDS.index("missing")
    kind[~mask] = KINDS.index("masked")
    return kind
