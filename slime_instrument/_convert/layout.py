"""Old per-rank train dumps: which rank held what. Inferred from the files and proven, or refused.

slime's old files say nothing of their parallel ranks, miles' say their context-parallel one. What shows them: ranks of
one data-parallel group hold the same samples; the lengths of response-level fields are those of one context-parallel
rank's shards; tensor-parallel ranks hold equal values; only the last pipeline stage holds what the loss computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from slime_instrument._dump.zigzag import shard_lengths
from slime_instrument._errors import DumpFormatError, five_parts
from slime_instrument._format.dumps import RankData
from slime_instrument._format.schema import CONTEXT_PARALLEL_FIELDS
from slime_instrument._format.values import as_ints, as_list, length_of, show

DEFAULT_ORDER = "tp-cp-dp-pp"
ORDERS = (DEFAULT_ORDER, "tp-cp-pp-dp")
"""How Megatron counts ranks, fastest first; the second with --use-tp-pp-dp-mapping."""

_OF_LAST_STAGE = ("log_probs", "advantages", "returns", "values")


@dataclass(frozen=True)
class Place:
    """Parallel ranks of one process."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """Parallel sizes of a run, and how they are known."""

    tp: int
    pp: int
    cp: int
    dp: int
    order: str = DEFAULT_ORDER
    how: Literal["given", "inferred"] = "given"

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    def place(self, rank: int) -> Place:
        """Where a global rank stands."""
        found = {}
        for name in self.order.split("-"):
            size = getattr(self, name)
            found[name], rank = rank % size, rank // size
        return Place(**found)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tp", "pp", "cp", "dp", "order", "how")}


def find_layout(
    ranks: Sequence[RankData],
    *,
    tp: int | None = None,
    pp: int | None = None,
    cp: int | None = None,
    dp: int | None = None,
    order: str | None = None,
) -> Layout:
    """The layout of the run that wrote these files.

    What is given is taken as given, and still compared with the files; what is not is inferred.

    Raises:
        DumpFormatError: no layout fits the files, or several that would restore different values.
    """
    if order is not None and sorted(order.split("-")) != ["cp", "dp", "pp", "tp"]:
        message = five_parts(
            "--order",
            expected=f"tp, cp, dp and pp joined by dashes, such as {DEFAULT_ORDER}",
            found=repr(order),
            follows="Nothing was converted.",
            next_step="Megatron counts the first name fastest.",
        )
        raise DumpFormatError(message)
    recorded = {rank.cp_size for rank in ranks if rank.cp_size is not None}
    if len(recorded | ({cp} if cp is not None else set())) > 1:
        asked = "" if cp is None else f", and {cp} was given"
        raise DumpFormatError(_refusal(ranks, f"they say context-parallel size {show(sorted(recorded))}{asked}"))
    cp = next(iter(recorded), cp)
    given = None not in (tp, pp, cp)
    files = _Files(ranks)
    last = max(files.numbers)
    for world in range(last + 1, 2 * (last + 1) + 1):
        sizes = _sizes(world, tp, pp, cp, dp)
        candidates = [
            Layout(*size, order=name, how="given" if given else "inferred")
            for size in sizes
            for name in ((order,) if order is not None else ORDERS)
        ]
        fitting = [layout for layout in candidates if files.misfit(layout) is None]
        if not fitting and given and candidates:
            raise DumpFormatError(_refusal(ranks, files.misfit(candidates[0]) or ""))
        if fitting:
            return _only(ranks, files, fitting)
    raise DumpFormatError(_refusal(ranks, "no sizes of tensor, pipeline and context parallelism explain them"))


class _Files:
    """What the files show, each thing looked at once."""

    def __init__(self, ranks: Sequence[RankData]) -> None:
        self.numbers = [rank.rank for rank in ranks]
        self._ranks = {rank.rank: rank for rank in ranks}
        self._contents = {rank.rank: _content(rank) for rank in ranks}
        self._lengths = {rank.rank: _field_lengths(rank) for rank in ranks}
        self._at_end = {
            rank.rank: any(rank.rollout_data.get(name) is not None for name in _OF_LAST_STAGE) for rank in ranks
        }
        self._equal: dict[tuple[int, int], bool] = {}
        self._expected: dict[tuple[int, int, int], list[int]] = {}

    def misfit(self, layout: Layout) -> str | None:
        """Why the files cannot come from this layout; None where they can."""
        places = {number: layout.place(number) for number in self.numbers}
        by_data_rank: dict[int, int] = {}
        owners: dict[Any, int] = {}
        for number, place in places.items():
            told = self._ranks[number].cp_rank
            if told not in (None, place.cp):
                return f"rank {number} says that it is of context-parallel rank {told}, not {place.cp}"
            first = by_data_rank.setdefault(place.dp, number)
            if self._contents[first] != self._contents[number]:
                return f"ranks {first} and {number} are of data-parallel rank {place.dp}, but hold other samples"
            other = owners.setdefault(self._contents[number], place.dp)
            if other != place.dp and self._contents[number]:
                return f"data-parallel ranks {other} and {place.dp} hold the same samples"
        at_end = any(self._at_end.values())
        for number, place in places.items():
            if at_end and self._at_end[number] != (place.pp == layout.pp - 1):
                has = "holds" if self._at_end[number] else "lacks"
                return f"rank {number} is of pipeline stage {place.pp}, but {has} what only the last one computes"
            trouble = self._wrong_lengths(number, layout.cp, place.cp)
            if trouble is not None:
                return trouble
        firsts: dict[tuple[int, int, int], int] = {}
        for number, place in places.items():
            twin = firsts.setdefault((place.cp, place.dp, place.pp), number)
            if twin != number and not self._same_values(twin, number):
                return f"ranks {twin} and {number} differ only in their tensor-parallel rank, but hold other values"
        return None

    def restores(self, layout: Layout) -> frozenset[Any]:
        """What decides the restored values: which rank is which part of which shard."""
        places = {number: layout.place(number) for number in self.numbers}
        return frozenset((number, place.cp, place.dp, layout.cp) for number, place in places.items())

    def _wrong_lengths(self, number: int, cp: int, cp_rank: int) -> str | None:
        data = self._ranks[number].rollout_data
        responses, totals = as_ints(data.get("response_lengths")), as_ints(data.get("total_lengths"))
        if responses is None or totals is None:
            return f"rank {number} has no lists response_lengths and total_lengths"
        key = (number, cp, cp_rank)
        if key not in self._expected:
            self._expected[key] = shard_lengths(totals, responses, cp, cp_rank, padded_lengths(data))
        expected = self._expected[key]
        for name, lengths in self._lengths[number].items():
            if lengths == expected or (name == "teacher_log_probs" and lengths in (responses, totals)):
                continue  # up to v0.2.1 the teacher's log-probs stay whole
            if len(lengths) != len(expected):
                return f"rank {number}: {name} has {len(lengths)} entries, but there are {len(expected)} samples"
            i = next(i for i, length in enumerate(lengths) if length != expected[i])
            return (
                f"rank {number} of context-parallel rank {cp_rank} of {cp}: {name} of sample {i} has {lengths[i]} "
                f"values, expected {expected[i]} (response {responses[i]} of {totals[i]} tokens)"
            )
        return None

    def _same_values(self, one: int, other: int) -> bool:
        if (one, other) not in self._equal:
            first, second = self._ranks[one].rollout_data, self._ranks[other].rollout_data
            names = [name for name in self._lengths[one] if name in self._lengths[other]]
            self._equal[one, other] = all(
                _equal(a, b) for name in names for a, b in zip(first[name], second[name], strict=True)
            )
        return self._equal[one, other]


def _only(ranks: Sequence[RankData], files: _Files, fitting: list[Layout]) -> Layout:
    """The layout, where all that fit restore the same values and agree on the sizes."""
    first = fitting[0]
    sizes = {(layout.tp, layout.pp, layout.cp, layout.dp) for layout in fitting}
    if len({files.restores(layout) for layout in fitting}) == 1 and len({size[2] for size in sizes}) == 1:
        return first
    shown = "; ".join(f"tp {tp} pp {pp} cp {cp} dp {dp}" for tp, pp, cp, dp in sorted(sizes))
    raise DumpFormatError(_refusal(ranks, f"several layouts fit ({shown})"))


def padded_lengths(data: Mapping[str, Any]) -> list[int] | None:
    """Per sample the length that chunks were cut from in the bshd layout (v0.2.2 to v0.3.0); None in any other."""
    return as_ints(data.get("max_seq_lens"))


def _sizes(
    world: int, tp: int | None, pp: int | None, cp: int | None, dp: int | None
) -> Iterator[tuple[int, int, int, int]]:
    """tp, pp, cp and dp whose product is ``world``; the fewest context-parallel and pipeline ranks first."""
    small = [n for n in range(1, math.isqrt(world) + 1) if world % n == 0]
    divisors = sorted({*small, *(world // n for n in small)})
    for c, p, t in itertools.product(
        *([one] if one is not None else divisors for one in (cp, pp, tp)),
    ):
        if world % (c * p * t) == 0 and (dp is None or dp == world // (c * p * t)):
            yield t, p, c, world // (c * p * t)


def _content(rank: RankData) -> Any:
    """What the ranks of one data-parallel group hold alike: tokens and indices."""
    tokens = as_list(rank.rollout_data.get("tokens")) or ()
    indices = as_ints(rank.rollout_data.get("sample_indices"))
    parts = tuple(one.contiguous().numpy().tobytes() if isinstance(one, torch.Tensor) else tuple(one) for one in tokens)
    return (parts, tuple(indices) if indices is not None else None) if parts else None


def _field_lengths(rank: RankData) -> dict[str, list[int]]:
    """Lengths of each response-level field, by sample."""
    found = {}
    for name in CONTEXT_PARALLEL_FIELDS:
        values = rank.rollout_data.get(name)
        if not isinstance(values, (list, tuple)) or all(value is None for value in values):
            continue
        lengths = [length_of(value) for value in values]
        found[name] = [-1 if length is None else length for length in lengths]
    return found


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype
        return same and bool(((a == b) | ((a != a) & (b != b))).all())
    return bool(a == b)


def _refusal(ranks: Sequence[RankData], found: str) -> str:
    return five_parts(
        f"the files of ranks {show([rank.rank for rank in ranks])}",
        expected="per-rank dumps of one rollout whose layout can be proven",
        found=found,
        follows="Nothing was converted.",
        next_step="Give the run's sizes (--tp --pp --cp, --order), and every rank's file.",
    )
