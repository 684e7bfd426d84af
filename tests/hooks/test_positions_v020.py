"""Positions at v0.2.0, which ships none: the cut is worked out again, and claimed only where the lengths prove it."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

import pytest

from slime_instrument._hooks.positions_v020 import reconstruct

LENGTHS = [9, 4, 7, 7, 5, 6, 8, 3]


def dealt(lengths: list[int], parts: int, equal_size: bool) -> list[list[int]]:
    """A stand-in for slime's own balancing: longest first, dealt out in turn."""
    assert equal_size
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [order[part::parts] for part in range(parts)]


@pytest.fixture(autouse=True)
def slime(monkeypatch: pytest.MonkeyPatch) -> None:
    """What v0.2.0 leaves behind: the timer with the lengths of the whole batch, and its balancing function."""

    class Timer:
        seq_lens = LENGTHS

    modules: dict[str, dict[str, Any]] = {
        "slime.utils.timer": {"Timer": Timer},
        "slime.utils.data": {"get_seqlen_balanced_partitions": dealt},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)


def local(positions: list[int]) -> dict[str, Any]:
    return {"total_lengths": [LENGTHS[position] for position in positions]}


def test_every_dp_sizeth_sample_without_balancing() -> None:
    args = Namespace(balance_data=False)
    assert reconstruct(args, local([1, 3, 5, 7]), 1, 2) == [1, 3, 5, 7]
    assert reconstruct(args, local([2, 6]), 2, 4) == [2, 6]


def test_whole_groups_balanced_by_length() -> None:
    args = Namespace(balance_data=True, n_samples_per_prompt=2)  # groups of 13, 14, 11 and 11 tokens
    assert reconstruct(args, local([2, 3, 4, 5]), 0, 2) == [2, 3, 4, 5]
    assert reconstruct(args, local([0, 1, 6, 7]), 1, 2) == [0, 1, 6, 7]


def test_samples_beyond_the_last_whole_group_are_on_no_rank() -> None:
    args = Namespace(balance_data=True, n_samples_per_prompt=4)  # one group each of 27 and 22 tokens
    assert reconstruct(args, local([0, 1, 2, 3]), 0, 2) == [0, 1, 2, 3]
    args.n_samples_per_prompt = 3  # 20 and 18 tokens; 6 and 7 are left over
    assert reconstruct(args, local([3, 4, 5]), 1, 2) == [3, 4, 5]


def test_nothing_is_claimed_where_the_lengths_contradict() -> None:
    args = Namespace(balance_data=False)
    assert reconstruct(args, local([0, 2, 4, 7]), 0, 2) is None
    assert reconstruct(args, local([0, 2]), 0, 2) is None


def test_nothing_is_claimed_where_the_whole_batch_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "slime.utils.timer")
    assert reconstruct(Namespace(balance_data=False), local([0, 2, 4, 6]), 0, 2) is None


def test_nothing_is_claimed_where_balancing_is_not_slimes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "slime.utils.data")
    args = Namespace(balance_data=True, n_samples_per_prompt=2)
    assert reconstruct(args, local([2, 3, 4, 5]), 0, 2) is None
