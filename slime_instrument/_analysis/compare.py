"""Compare what the engine sampled with what training computed: the record behind ``slime-instrument compare``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_instrument._analysis.evidence import Finding, View
from slime_instrument._analysis.findings import diagnose
from slime_instrument._analysis.metrics import Limits, measure
from slime_instrument._analysis.metrics.samples import per_sample, worst_tokens
from slime_instrument._analysis.table import TokenTable
from slime_instrument._analysis.tabulate import tabulate
from slime_instrument._errors import DumpFormatError, five_parts
from slime_instrument._format.dumps import RolloutDump, TrainDump, read_rollout_dump, read_train_dump
from slime_instrument._format.join import Join, join
from slime_instrument._format.schema import PROVENANCE
from slime_instrument._format.values import plain_value

__all__ = ["Comparison", "compare"]

PathLike = str | os.PathLike[str]


class Comparison(dict[str, Any]):
    """One rollout dump against its train dump: what ``--json`` prints, as a dict of plain values without NaN.

    Every key is an attribute too.

    Attributes:
        rollout_dump, train_dump: what was compared; old per-rank files as the v2 dump that they convert to. A rollout
            dump that was given by its path has long lists of numbers as ``array.array``.
        joined: who belongs to whom.
        table: the tokens of the joined samples.
        diagnosis: the findings, with the tokens that each explains.
    """

    def __init__(
        self,
        record: dict[str, Any],
        *,
        rollout_dump: RolloutDump,
        train_dump: TrainDump,
        joined: Join,
        table: TokenTable,
        diagnosis: list[Finding],
    ) -> None:
        super().__init__(record)
        self.rollout_dump, self.train_dump = rollout_dump, train_dump
        self.joined, self.table, self.diagnosis = joined, table, diagnosis

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def clean(self) -> bool:
        """Whether nothing was found. Thresholds are not part of this."""
        return not self.diagnosis

    def as_dict(self) -> dict[str, Any]:
        """The record as an ordinary dict."""
        return dict(self)


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
        The comparison: a dict that is what ``slime-instrument compare --json`` prints.

    Raises:
        DumpFormatError: a file cannot be read, is of another kind, the rollout is an evaluation's, or per-rank files
            do not tell their layout.
        OSError: a file is missing or may not be read.
    """
    source, trained = rollout, train
    if not isinstance(source, RolloutDump):
        source = read_rollout_dump(source, allow_pickle=allow_pickle, compact=True)
    if not isinstance(trained, TrainDump):
        trained = read_train_dump(trained)
    warnings: list[str] = []
    if trained.kind == "train-rank":
        from slime_instrument._convert import convert_dump

        converted = convert_dump(trained, rollout=source)
        trained, warnings = converted.dump, list(converted.warnings)
    ids = (source.rollout_id, trained.rollout_id)
    if None not in ids and ids[0] != ids[1]:
        warnings.append(f"{source.path} is of rollout {ids[0]}, but {Path(trained.path)} of rollout {ids[1]}")
    if field != "log_probs" and trained.samples and not any(field in sample for sample in trained.samples):
        raise DumpFormatError(_no_such_field(trained, field))
    joined = join(source, trained)
    table = tabulate(joined.pairs, train_field=field)
    diagnosis = diagnose(View(source, trained, joined, table))
    record = {
        "rollout": str(source.path),
        "train": [str(path) for path in trained.paths],
        "rollout_id": trained.rollout_id,
        "n_train": len(trained.samples),
        "n_rollout": len(source.samples),
        "n_joined": len(joined.pairs),
        "n_tokens": int(table.pair_sums.counts.sum()),
        "log_probs": _origin(trained, field),
        **measure(table, trained.rollout_id, limits or Limits()),
        "unmatched": [one.as_dict() for one in joined.unmatched],
        "findings": [finding.as_dict() for finding in diagnosis],
        "worst": worst_tokens(table),
        "samples": per_sample(table),
        "warnings": [*warnings, *table.problems],
    }
    return Comparison(record, rollout_dump=source, train_dump=trained, joined=joined, table=table, diagnosis=diagnosis)


def _no_such_field(train: TrainDump, field: str) -> str:
    per_token = {str(name) for sample in train.samples for name in sample if str(name).endswith("log_probs")}
    return five_parts(
        str(train.path),
        expected="a field that its samples hold: " + (", ".join(sorted(per_token)) or "they hold no log-probs"),
        found=repr(field),
        follows="Nothing was compared.",
        next_step="slime-instrument inspect lists every field.",
    )


def _origin(train: TrainDump, field: str) -> dict[str, Any]:
    """Where the train side's values come from, as the file says it; None where it does not."""
    for shard in train.dp_shards:
        provenance = shard.get(PROVENANCE)
        if isinstance(provenance, dict):
            fields = provenance.get("fields")
            origin = fields.get(field) if isinstance(fields, dict) else None
            return {"field": field, "origin": plain_value(origin), "absent": plain_value(provenance.get(field))}
    return {"field": field, "origin": None, "absent": None}
