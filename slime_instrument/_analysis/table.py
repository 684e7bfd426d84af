"""All joined response tokens as flat tensors. Everything that is measured is measured on these.

``N`` counts the response tokens of all pairs one after another, ``S`` the pairs, ``M`` the comparable tokens: mask 1 on
the train side and a usable log-prob on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from slime_instrument._analysis.blocks import Block, PairSums, blocks_of
from slime_instrument._format.join import Pair
from slime_instrument._format.values import integers, length_of, log_probs, truth, whole_number

TOKEN_KINDS = ("comparable", "masked", "missing", "nan", "inf", "filler", "removed")
"""What a token is; its number in :attr:`TokenTable.kind`. A token that is several things is the first that applies,
in the order masked, missing, nan, inf, filler."""

FILLER = -900.0
"""Below this no value is a log-prob: a softmax over logits that a model produces gives none. Engines and frameworks
write -999, -9999, -1e4, -65504, -1e30 or the lowest number of their type for "no value"."""
_LOWEST_FLOAT8 = (-448.0, -240.0)  # the only types whose lowest number is above that


@dataclass(frozen=True)
class TokenTable:
    """The tokens of all joined pairs.

    Attributes:
        pairs: the joined pairs, in the order of their tokens.
        lengths: response lengths, int64, shape ``(S,)``.
        rollout, train: log-probs, float32, shape ``(N,)``; what is missing is NaN.
        mask: loss mask of the train side, bool, shape ``(N,)``.
        rollout_mask: loss mask of the rollout side, bool, shape ``(N,)``; 1 where it has none.
        kind: index into :data:`TOKEN_KINDS`, uint8, shape ``(N,)``.
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
    def pair_sums(self) -> PairSums:
        """Counts and sums of the comparable tokens of each pair."""
        return PairSums.of(self.blocks(), len(self.lengths))

    @cached_property
    def size(self) -> torch.Tensor:
        """\\|δ\\| of the comparable tokens, float32, shape ``(M,)``. For order and counts; sums take :meth:`blocks`."""
        found, place = torch.empty(int(self.pair_sums.counts.sum())), 0
        for block in self.blocks():
            found[place : place + len(block)] = block.size
            place += len(block)
        return found

    @cached_property
    def delta(self) -> torch.Tensor:
        """train - rollout of the comparable tokens, float64, shape ``(M,)``. Large: prefer :meth:`blocks`."""
        parts = [block.delta for block in self.blocks()]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)

    def blocks(self, chosen: torch.Tensor | None = None) -> Iterator[Block]:
        """The table part by part.

        Args:
            chosen: the tokens that count, bool, shape ``(N,)``; by default the comparable ones.
        """
        chosen = self.comparable if chosen is None else chosen
        return blocks_of(self.lengths, self.mask, self.rollout, self.train, chosen)

    def tokens_of(self, pair: int) -> slice:
        """Where the tokens of one pair stand."""
        start = int(self.starts[pair])
        return slice(start, start + int(self.lengths[pair]))

    def counts_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """How many of ``tokens``, bool, shape ``(N,)``, each pair has: int64, shape ``(S,)``."""
        if not bool(tokens.any()):
            return torch.zeros(len(self.lengths), dtype=torch.int64)
        return torch.cat([block.counts for block in self.blocks(tokens)])

    @cached_property
    def kind_counts(self) -> dict[str, int]:
        """Tokens of each of :data:`TOKEN_KINDS`."""
        return dict(zip(TOKEN_KINDS, torch.bincount(self.kind, minlength=len(TOKEN_KINDS)).tolist(), strict=True))

    def excluded(self) -> dict[str, int]:
        """Tokens by the kind for which they do not count; ``removed`` counts samples."""
        excluded = {kind: n for kind, n in self.kind_counts.items() if kind not in ("comparable", "removed")}
        return {**excluded, "removed": int(self.removed.sum())}


_UNSEEN = float("nan")


def tabulate(pairs: Sequence[Pair], *, train_field: str = "log_probs") -> TokenTable:
    """Lay the tokens of all pairs out flat.

    Args:
        pairs: joined samples.
        train_field: field of the train side to compare with ``rollout_log_probs``.
    """
    problems: list[str] = []
    lengths = [_response_length(pair, train_field) for pair in pairs]
    total = sum(lengths)
    theirs = _LogProbs("rollout", "rollout_log_probs", problems, total)
    ours = _LogProbs("train", train_field, problems, total)
    masks = _Masks("train", "loss_masks", problems, total)
    rollout_masks = _Masks("rollout", "loss_mask", problems, total)
    for pair, n in zip(pairs, lengths, strict=True):
        theirs.add(pair, pair.rollout.get("rollout_log_probs"), n)
        stored = pair.train.get(train_field)
        ours.add(pair, stored, n)
        if n and whole_number(pair.train.get("total_lengths")) == n:
            ours.without_prompt()
        masks.add(pair, pair.train.get("loss_masks"), n)
        rollout_masks.add(pair, pair.rollout.get("loss_mask"), n)
    kind = _kinds(theirs.flat, ours.flat, masks.flat, theirs.missing | ours.missing)
    length = torch.tensor(lengths, dtype=torch.int64)
    removed = torch.tensor([truth(pair.rollout.get("remove_sample")) for pair in pairs], dtype=torch.bool)
    if bool(removed.any()):
        kind[removed.repeat_interleave(length)] = TOKEN_KINDS.index("removed")
    return TokenTable(
        pairs=pairs,
        lengths=length,
        rollout=theirs.flat,
        train=ours.flat,
        mask=masks.flat,
        rollout_mask=rollout_masks.flat,
        kind=kind,
        removed=removed,
        has_rollout_mask=torch.tensor(rollout_masks.present, dtype=torch.bool),
        train_dtypes=frozenset(ours.dtypes),
        problems=problems,
        misfits=ours.misfits,
    )


class _LogProbs:
    """The log-probs of one side, filled in pair by pair."""

    def __init__(self, side: str, name: str, problems: list[str], n_tokens: int) -> None:
        self.side, self.name, self.problems = side, name, problems
        self.flat = torch.full((n_tokens,), _UNSEEN)
        self.missing = torch.zeros(n_tokens, dtype=torch.bool)
        self.dtypes: set[torch.dtype] = set()
        self.misfits: dict[int, torch.Tensor] = {}
        self.n_pairs = self.start = self.end = 0

    def add(self, pair: Pair, value: Any, n: int) -> None:
        """Take the next pair's values, which should be ``n``."""
        self.start, self.end = self.end, self.end + n
        span = slice(self.start, self.end)
        converted = log_probs(value)
        if isinstance(value, torch.Tensor):
            self.dtypes.add(value.dtype)
        if converted is not None and len(converted[0]) == n:
            self.flat[span] = converted[0]
            if converted[1] is not None:
                self.missing[span] = converted[1]
        else:
            if value is not None:
                found = f"{length_of(value)} values" if converted is not None else f"a {type(value).__name__}"
                self.problems.append(_problem(self.side, self.name, pair, found, n))
                if converted is not None:
                    self.misfits[self.n_pairs] = converted[0]
            self.missing[span] = True
        self.n_pairs += 1

    def without_prompt(self) -> None:
        """No logit predicts the first token of the last pair: it cannot have a value."""
        if bool(self.flat[self.start].isnan()):
            self.missing[self.start] = True


class _Masks:
    """The loss masks of one side, filled in pair by pair. A side without a mask trains on everything."""

    def __init__(self, side: str, name: str, problems: list[str], n_tokens: int) -> None:
        self.side, self.name, self.problems = side, name, problems
        self.flat = torch.ones(n_tokens, dtype=torch.bool)
        self.present: list[bool] = []
        self.end = 0

    def add(self, pair: Pair, value: Any, n: int) -> None:
        """Take the next pair's values, which should be ``n``."""
        span = slice(self.end, self.end + n)
        self.end += n
        numbers = value if isinstance(value, torch.Tensor) and value.dim() == 1 else integers(value)
        usable = numbers is not None and len(numbers) == n
        self.present.append(usable)
        if usable and numbers is not None:
            self.flat[span] = numbers != 0
        elif value is not None:
            length = length_of(value)
            found = f"{length} values" if length is not None else f"a {type(value).__name__}"
            self.problems.append(_problem(self.side, self.name, pair, found, n))


def _problem(side: str, name: str, pair: Pair, found: str, n: int) -> str:
    return f"{side} sample at position {pair.position}: {name} has {found}, but the response has {n} tokens"


def _response_length(pair: Pair, train_field: str) -> int:
    """As stated, but never more than the longest value that the pair holds: a damaged file may state anything."""
    names = ("tokens", "loss_masks", train_field)
    held = [pair.train.get(name) for name in names]
    held += [pair.rollout.get(name) for name in ("tokens", "loss_mask", "rollout_log_probs")]
    longest = max(length_of(value) or 0 for value in held)
    for value in (pair.train.get("response_lengths"), pair.rollout.get("response_length")):
        number = whole_number(value)
        if number is not None and number >= 0:
            return min(number, longest)
    return length_of(pair.train.get("loss_masks")) or 0


def _kinds(rollout: torch.Tensor, train: torch.Tensor, mask: torch.Tensor, missing: torch.Tensor) -> torch.Tensor:
    """Number of the first kind that applies. Later assignments win, so they run from the last kind to the first."""
    kind = torch.zeros(len(mask), dtype=torch.uint8)
    if not (_ordinary(rollout) and _ordinary(train)):
        kind[is_filler(rollout) | is_filler(train)] = TOKEN_KINDS.index("filler")
        kind[rollout.isinf() | train.isinf()] = TOKEN_KINDS.index("inf")
        kind[rollout.isnan() | train.isnan()] = TOKEN_KINDS.index("nan")
    kind[missing] = TOKEN_KINDS.index("missing")
    kind[~mask] = TOKEN_KINDS.index("masked")
    return kind


def _ordinary(values: torch.Tensor) -> bool:
    """Whether none is NaN, infinite or a filler. The least and the largest value tell: a NaN makes both NaN."""
    if not len(values):
        return True
    least, largest = torch.aminmax(values)
    return float(least) > max(_LOWEST_FLOAT8) and float(largest) < float("inf")


def is_filler(values: torch.Tensor) -> torch.Tensor:
    """Which values stand for "no log-prob", bool, of the same shape."""
    found = values < FILLER
    for lowest in _LOWEST_FLOAT8:
        found |= values == lowest
    return found
