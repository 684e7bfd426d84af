"""What is tried: each site, in each micro-batch, on each rank, lenient and strict, first and second rollout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tests.faults.sites import ALL, Site

__all__ = ["Layout", "Scenario", "everything", "reference"]

SAMPLES = 4
ROLLOUTS = 7
"""Played at most: after a rank that stood still, five more must be as without it."""


@dataclass(frozen=True)
class Layout:
    tp: int
    pp: int
    cp: int
    dp: int

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def micro_batches(self) -> int:
        return SAMPLES // self.dp

    def reach(self, who: str) -> list[int]:
        """The ranks that reach a site. Order of ranks: tensor-parallel fastest, then context, data, pipeline."""
        last_stage = [rank for rank in range(self.world) if rank // (self.tp * self.cp * self.dp) == self.pp - 1]
        part = [rank for rank in last_stage if rank % self.tp == 0]
        return {
            "all": list(range(self.world)),
            "last-stage": last_stage,
            "part": part,
            "writer": part[:1],
            "sender": part[1:],
        }[who]

    def __str__(self) -> str:
        return "·".join(f"{name.upper()}{size}" for name, size in asdict(self).items() if size > 1)


@dataclass(frozen=True)
class Scenario:
    """``rank`` -1: on all ranks alike. ``faulty``: the rollouts in which the fault is live, of ``rollouts`` played.

    ``alone``: an exception leaves training in the middle of its collectives, on one rank or at different places; the
    other ranks then wait in vain, whatever we do. So the processes are used for nothing else and are ended.
    """

    site: str
    rank: int
    nth: int | None
    strict: bool
    faulty: tuple[int, ...]
    rollouts: int
    alone: bool = False

    @property
    def name(self) -> str:
        rank = "all ranks" if self.rank < 0 else f"rank {self.rank}"
        batch = "" if self.nth is None else f" batch {self.nth}"
        mode = "strict" if self.strict else "lenient"
        return f"{self.site}{batch} {rank} {mode} rollout {'+'.join(map(str, self.faulty))}"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Scenario:
        return cls(**{**values, "faulty": tuple(values["faulty"])})


def reference() -> Scenario:
    """Armed, a site that never fires: what the dumps and the weights are without a fault."""
    return Scenario("dump/topology", -1, None, False, (), ROLLOUTS)


def everything(layout: Layout, *, native_capture: bool = False) -> Iterator[Scenario]:
    """``native_capture``: slime since #2266 takes the log-probs itself, and ours are not in place."""
    for site in ALL.values():
        if native_capture and site.captures:
            continue
        batches = range(layout.micro_batches) if site.per_batch else (site.nth,)
        for nth in batches:
            yield from _modes(site, nth, layout)


def _modes(site: Site, nth: int | None, layout: Layout) -> Iterator[Scenario]:
    if site.kind == "peer":
        killed = site.action == "kill"
        for rank in layout.reach(site.who):
            if killed:
                yield from (Scenario(site.name, rank, nth, False, (at,), at + 1, True) for at in (0, 1))
            else:
                yield Scenario(site.name, rank, nth, False, (1,), ROLLOUTS)
        return
    if site.kind == "slime":
        # Training ends on all ranks alike. With pipeline stages messages are then still on their way.
        alone = layout.pp > 1 and site.phase == "train"
        for strict in (False, True):
            if alone:
                yield from (Scenario(site.name, -1, nth, strict, (at,), at + 1, True) for at in (0, 1))
            else:
                yield Scenario(site.name, -1, nth, strict, (0, 2), 4)
        return
    for rank in layout.reach(site.who):
        yield Scenario(site.name, rank, nth, False, (0, 2), 4)
        if site.phase == "dump":
            yield Scenario(site.name, rank, nth, True, (0, 2), 4)
        else:
            yield from (Scenario(site.name, rank, nth, True, (at,), at + 1, True) for at in (0, 1))
