"""Compare what the engine sampled with what training computed: the record behind ``slime-instrument compare``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slime_instrument._analysis.diagnosis import Finding, View
from slime_instrument._analysis.findings import diagnose
from slime_instrument._analysis.metrics import (
    Limits,
    Metrics,
    SampleMetrics,
    WorstToken,
    measure,
    per_sample,
    worst_tokens,
)
from slime_instrument._analysis.pair import PathLike, ReadPair, joined_pair, read_train
from slime_instrument._analysis.table import TokenTable, tabulate
from slime_instrument._analysis.verdict import Verdict, judge
from slime_instrument._errors import DumpFormatError, five_parts
from slime_instrument._format.dumps import RolloutDump, TrainDump, read_rollout_dump
from slime_instrument._format.join import Join
from slime_instrument._format.references import count_references
from slime_instrument._format.values import plain_value


@dataclass(frozen=True)
class Origin:
    """Where the train side's values come from, as its provenance says it; None where it does not.

    Attributes:
        field: the field of the train side.
        origin: such as ``recomputed`` or ``captured``.
        absent: why the dump lacks the field.
    """

    field: str
    origin: Any
    absent: Any


@dataclass(frozen=True)
class Comparison:
    """One rollout dump against its train dump.

    ``comparison["n_tokens"]`` gives what ``--json`` has under that key.

    Attributes:
        rollout_dump, train_dump: what was compared; old per-rank files as the v2 dump that they convert to. A rollout
            dump that was given by its path has long lists of numbers as tensors.
        joined: who belongs to whom.
        table: the tokens of the joined samples.
        metrics: every metric.
        findings: the causes that the data shows.
        samples: metrics of each joined sample, in rollout order.
        worst: the tokens that differ most.
        log_probs: where the train side's values come from.
        warnings: what could not be used, one sentence each.
        verdict: the judgement on all of it.
    """

    rollout_dump: RolloutDump
    train_dump: TrainDump
    joined: Join
    table: TokenTable
    metrics: Metrics
    findings: tuple[Finding, ...]
    samples: tuple[SampleMetrics, ...]
    worst: tuple[WorstToken, ...]
    log_probs: Origin
    warnings: tuple[str, ...]
    verdict: Verdict

    @property
    def clean(self) -> bool:
        """Whether nothing was found. Thresholds are not part of this."""
        return not self.findings

    @property
    def diagnosis(self) -> tuple[Finding, ...]:
        """The findings."""
        return self.findings

    @property
    def rollout_id(self) -> int | None:
        """Of the train dump, else of the rollout dump."""
        return self.pair.rollout_id

    @property
    def n_train(self) -> int:
        """Samples in the train dump."""
        return len(self.train_dump.samples)

    @property
    def n_rollout(self) -> int:
        """Samples in the rollout dump."""
        return len(self.rollout_dump.samples)

    @property
    def n_joined(self) -> int:
        """Samples that were joined."""
        return len(self.joined.pairs)

    @property
    def n_tokens(self) -> int:
        """Comparable tokens."""
        return self.metrics.n_tokens

    @property
    def pair(self) -> ReadPair:
        """Both sides, as every other analysis takes them."""
        return ReadPair(self.rollout_dump, self.train_dump, self.joined)

    def value(self, name: str) -> float | None:
        """A metric or count by its dotted name, for thresholds; infinite where it exceeds what a float holds.

        Raises:
            KeyError: there is none of that name.
        """
        if name in ("n_train", "n_rollout", "n_joined"):
            return float(getattr(self, name))
        return self.metrics.value(name)

    @cached_property
    def _record(self) -> dict[str, Any]:
        return {
            "rollout": str(self.rollout_dump.path),
            "train": [str(path) for path in self.train_dump.paths],
            "rollout_id": self.rollout_id,
            "n_train": self.n_train,
            "n_rollout": self.n_rollout,
            "n_joined": self.n_joined,
            "n_tokens": self.n_tokens,
            "log_probs": plain_value(asdict(self.log_probs)),
            **self.metrics.as_dict(),
            "unmatched": [one.as_dict() for one in self.joined.unmatched],
            "findings": [finding.as_dict() for finding in self.findings],
            "worst": [plain_value(asdict(one)) for one in self.worst],
            "samples": [plain_value(asdict(one)) for one in self.samples],
            "references": {
                "rollout": count_references(self.rollout_dump.samples).as_dict(),
                "train": count_references(self.train_dump.samples).as_dict(),
            },
            "warnings": list(self.warnings),
            "verdict": self.verdict.as_dict(),
        }

    def as_dict(self) -> dict[str, Any]:
        """What ``slime-instrument compare --json`` prints: plain values without NaN."""
        return dict(self._record)

    def __getitem__(self, key: str) -> Any:
        return self._record[key]


def compare(
    rollout: PathLike | RolloutDump,
    train: PathLike | Sequence[PathLike] | TrainDump,
    *,
    allow_pickle: bool = False,
    limits: Limits | None = None,
    field: str = "log_probs",
) -> Comparison:
    """Join a rollout dump to its train dump, measure the mismatch and name its cause.

    Args:
        rollout: a rollout dump, or its path.
        train: a v2 train dump, its path, or the paths of the old per-rank files of one rollout.
        allow_pickle: read rollout dumps with objects of arbitrary classes; this can run code from them.
        limits: parameters of the corrections that are simulated.
        field: per-token field of the train side that is held against the rollout's log-probs: ``log_probs``, or any
            other that the dump has, such as ``ref_log_probs``, or ``rollout_log_probs`` as training received them.

    Returns:
        The comparison; its ``as_dict()`` is what ``slime-instrument compare --json`` prints.

    Raises:
        DumpFormatError: a file cannot be read, is of another kind, the rollout is an evaluation's, or per-rank files
            do not tell their layout.
        OSError: a file is missing or may not be read.
    """
    source, trained = rollout, train
    ours: list[RolloutDump | TrainDump] = []  # nobody else has them, so that their memory can be given back
    if not isinstance(source, RolloutDump):
        source = read_rollout_dump(source, allow_pickle=allow_pickle, compact=True)
        ours.append(source)
    if not isinstance(trained, TrainDump):
        trained = read_train(trained)
        ours.append(trained)
    pair = joined_pair(source, trained)
    trained, joined = pair.train, pair.joined
    warnings = list(pair.warnings)
    ids = (source.rollout_id, trained.rollout_id)
    if None not in ids and ids[0] != ids[1]:
        warnings.append(f"{source.path} is of rollout {ids[0]}, but {Path(trained.path)} of rollout {ids[1]}")
    for one in (source, trained):
        references = count_references(one.samples)
        if references.missing:
            warnings.append(f"{one.path} has {references}; they are not needed here")
    if field != "log_probs" and trained.samples and not any(field in sample for sample in trained.samples):
        raise DumpFormatError(_no_such_field(trained, field))
    _give_back(ours)
    table = tabulate(joined.pairs, train_field=field)
    _give_back(ours)
    origin = _origin(trained, field)
    metrics = measure(table, limits, trainer_version=trained.provenance.weight_version)
    findings = diagnose(View(source, trained, joined, table))
    why = _why_nothing(joined, metrics, origin) if not metrics.n_tokens else ""
    return Comparison(
        rollout_dump=source,
        train_dump=trained,
        joined=joined,
        table=table,
        metrics=metrics,
        findings=findings,
        samples=tuple(per_sample(table)),
        worst=tuple(worst_tokens(table)),
        log_probs=origin,
        warnings=(*warnings, *table.problems),
        verdict=judge(metrics, findings, n_joined=len(joined.pairs), why_nothing=why),
    )


def _why_nothing(joined: Join, metrics: Metrics, origin: Origin) -> str:
    if not joined.pairs:
        reasons = sorted({one.reason for one in joined.unmatched})
        return f"no sample could be joined ({', '.join(reasons) or 'the dumps are empty'})"
    counts = ", ".join(f"{count} {kind}" for kind, count in metrics.excluded.items() if count)
    text = f"{len(joined.pairs)} samples were joined, but no token has both log-probs ({counts or 'no tokens'})"
    return text if origin.absent is None else f"{text}; the train dump says: {origin.absent}"


def _give_back(dumps: Sequence[RolloutDump | TrainDump]) -> None:
    for dump in dumps:
        dump.give_back_memory()


def _no_such_field(train: TrainDump, field: str) -> str:
    per_token = {str(name) for sample in train.samples for name in sample if str(name).endswith("log_probs")}
    return five_parts(
        str(train.path),
        expected="a field that its samples hold: " + (", ".join(sorted(per_token)) or "they hold no log-probs"),
        found=repr(field),
        follows="Nothing was compared.",
        next_step="slime-instrument inspect lists every field.",
    )


def _origin(train: TrainDump, field: str) -> Origin:
    provenance = train.provenance
    return Origin(field, provenance.fields.get(field), provenance.record.get(field))
