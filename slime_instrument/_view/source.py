"""What the viewer shows, loaded as late as possible.

A train dump is memory-mapped, so opening one costs a moment whatever its size; it holds both log-probs of every token.
The rollout dump, which may take minutes to read, adds rewards, status and text afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_instrument._analysis.table import TokenTable, tabulate
from slime_instrument._analysis.verdict import Verdict
from slime_instrument._errors import DumpFormatError, five_parts
from slime_instrument._format.dumps import TrainDump, read_rollout_dump, read_train_dump, rollout_id_of
from slime_instrument._format.join import Pair
from slime_instrument._format.pairs import find_pairs
from slime_instrument._format.values import number, whole_number


@dataclass
class Row:
    """One train sample. What is not known yet, or not at all, is None."""

    place: int
    position: int | None
    index: int | None
    length: int | None
    reward: float | None = None
    status: str | None = None
    n_tokens: int | None = None
    mean_abs: float | None = None
    max_abs: float | None = None
    findings: list[str] = field(default_factory=list)

    def matches(self, wanted: str) -> bool:
        """Whether a search text fits: a number is a position or index, other text stands in status or findings."""
        wanted = wanted.strip().lower()
        if not wanted:
            return True
        if wanted.isdigit():
            return int(wanted) in (self.position, self.index)
        return any(wanted in text.lower() for text in (self.status or "", *self.findings))


class Source:
    """A train dump, and the rollout dump beside it if there is one."""

    def __init__(self, train: Path, rollout: Path | None = None, *, allow_pickle: bool = False) -> None:
        self.train_path, self.rollout_path = train, rollout
        self._allow_pickle = allow_pickle
        dump = read_train_dump(train)
        if dump.kind != "train-v2":
            raise DumpFormatError(
                five_parts(
                    str(train),
                    expected="a v2 train dump",
                    found="an old per-rank file, which holds a part of each response",
                    follows="Nothing is shown.",
                    next_step="slime-instrument convert makes a v2 dump of such files.",
                )
            )
        self.dump: TrainDump = dump
        self.verdict: Verdict | None = None
        self.texts: dict[int, dict[str, Any]] = {}
        rewards = dump.whole_batch.get("raw_reward")
        self.rows = [_row(place, sample, rewards) for place, sample in enumerate(dump.samples)]

    def measure(self, place: int) -> None:
        """Fill in the mismatch of one sample."""
        row, table = self.rows[place], self.table(place)
        sums = table.pair_sums
        row.n_tokens = int(sums.counts)
        if row.n_tokens:
            row.mean_abs, row.max_abs = float(sums.size / sums.counts), float(sums.largest)

    def table(self, place: int) -> TokenTable:
        """The tokens of one sample, from the train dump alone."""
        sample = self.dump.samples[place]
        source = {
            "rollout_log_probs": sample.get("rollout_log_probs"),
            "response_length": sample.get("response_lengths"),
        }
        return tabulate([Pair(place, None, sample, source, False)])

    def read_rollout(self) -> list[str]:
        """Read the rollout dump and compare; returns one line per finding. Takes as long as that file takes."""
        if self.rollout_path is None:
            return []
        from slime_instrument._analysis.compare import compare

        source = read_rollout_dump(self.rollout_path, allow_pickle=self._allow_pickle)
        compared = compare(source, self.dump)
        by_position = {row.position: row for row in self.rows if row.position is not None}
        for position, sample in enumerate(source.samples):
            row = by_position.get(position)
            if row is None:
                continue
            reward, status = sample.get("reward"), sample.get("status")
            row.reward = number(reward) if not isinstance(reward, dict) else row.reward
            row.status = None if status is None else str(getattr(status, "value", status))
            self.texts[row.place] = sample
        for finding in compared.findings:
            for position in finding.samples:
                if position in by_position:
                    by_position[position].findings.append(finding.code)
        self.verdict = compared.verdict
        return [f"verdict: {compared.verdict.text}", *(f"{one.code}: {one.message}" for one in compared.findings)]


def choose_files(
    given: Sequence[Path], rollout: int | None, *, allow_pickle: bool = False
) -> tuple[list[tuple[Path, Path | None]], int]:
    """Each train dump with its rollout dump, where there is one, in the order of rollouts; and which to look at first.

    Args:
        given: folders, a train dump, or a train dump and a rollout dump, in any order.
        rollout: which rollout of a folder; None is the last one.
        allow_pickle: read rollout dumps with objects of arbitrary classes; this can run code from them.

    Raises:
        DumpFormatError: there is no train dump among them, or not that rollout's.
        OSError: a file is missing.
    """
    pairing = find_pairs(given, allow_pickle=allow_pickle)
    found: list[tuple[int | None, Path, Path | None]] = [
        (one.rollout_id, one.train[0], one.rollout) for one in pairing.pairs
    ]
    lone = [one.lone for one in pairing.skipped if one.lone is not None]
    # Opening what cannot be read says what is wrong with it, beside the train dump.
    broken = {rollout_id_of(one.file): one.file for one in pairing.unreadable}
    found += [(one.rollout_id, one.path, broken.get(one.rollout_id)) for one in lone if one.kind.startswith("train")]
    found.sort(key=lambda one: -1 if one[0] is None else one[0])
    wanted = [i for i, one in enumerate(found) if rollout in (None, one[0])]
    if not wanted:
        unread = [str(one) for one in pairing.unreadable if rollout in (None, rollout_id_of(one.file))]
        raise DumpFormatError(
            five_parts(
                ", ".join(map(str, given)),
                expected=f"a train dump of rollout {rollout}" if rollout is not None else "a train dump",
                found="; ".join(unread[:3]) or "none",
                follows="Nothing is shown.",
                next_step="Give a --dump-details folder, or ROLLOUT TRAIN.",
            )
        )
    return [(train, source) for _, train, source in found], wanted[-1]


def _row(place: int, sample: dict[str, Any], rewards: Any) -> Row:
    position = whole_number(sample.get("rollout_position"))
    known = position is not None and isinstance(rewards, (list, tuple)) and 0 <= position < len(rewards)
    return Row(
        place=place,
        position=position,
        index=whole_number(sample.get("sample_index")),
        length=whole_number(sample.get("response_lengths")),
        reward=number(rewards[position]) if known else None,
    )
