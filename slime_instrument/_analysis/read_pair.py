"""Both sides of one rollout, read and joined: where every command that works on pairs begins."""

from __future__ import annotations

from dataclasses import dataclass

from slime_instrument._format.dumps import Provenance, RolloutDump, TrainDump, read_rollout_dump, read_train_dump
from slime_instrument._format.join import Join, join
from slime_instrument._format.pairs import FilePair


@dataclass(frozen=True)
class ReadPair:
    """A rollout dump and its train dump.

    Attributes:
        rollout, train: the dumps; old per-rank files as the v2 dump that they convert to.
        joined: who belongs to whom.
        provenance: what the train dump says about its run.
        warnings: from the conversion.
    """

    rollout: RolloutDump
    train: TrainDump
    joined: Join
    provenance: Provenance
    warnings: tuple[str, ...] = ()

    @property
    def rollout_id(self) -> int | None:
        return self.train.rollout_id if self.train.rollout_id is not None else self.rollout.rollout_id


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
    train = read_train_dump(pair.train[0] if len(pair.train) == 1 else list(pair.train))
    return joined_pair(rollout, train)


def joined_pair(rollout: RolloutDump, train: TrainDump) -> ReadPair:
    """The same for dumps that are read already."""
    warnings: tuple[str, ...] = ()
    if train.kind == "train-rank":
        from slime_instrument._convert import convert_dump

        converted = convert_dump(train, rollout=rollout)
        train, warnings = converted.dump, tuple(converted.warnings)
    return ReadPair(rollout, train, join(rollout, train), train.provenance, warnings)
