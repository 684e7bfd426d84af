"""The metrics of a dump that is still in memory. Bounded: a large dump is measured on evenly spaced samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_instrument._analysis.diagnosis import Finding, View
from slime_instrument._analysis.findings import diagnose
from slime_instrument._analysis.metrics import Metrics, measure
from slime_instrument._analysis.table import tabulate
from slime_instrument._analysis.verdict import Verdict, judge
from slime_instrument._format.dumps import RolloutDump, TrainDump
from slime_instrument._format.join import Join, Pair
from slime_instrument._format.schedule import Schedule
from slime_instrument._format.values import whole_number

_NAMED = 20  # samples of a finding
MOST_TOKENS = 1_000_000
"""Response tokens that are measured at most: about a second of tensor work on one core."""


@dataclass(frozen=True)
class Measured:
    """What was measured on one dump.

    Attributes:
        rollout_id: of the dump.
        n_samples, n_samples_measured: samples in the dump, and those that stand for them.
        metrics: as of a comparison.
        findings, verdict: as of a comparison.
    """

    rollout_id: int | None
    n_samples: int
    n_samples_measured: int
    metrics: Metrics
    findings: tuple[Finding, ...]
    verdict: Verdict

    def as_dict(self) -> dict[str, Any]:
        """As one line of ``metrics.jsonl`` has it."""
        return {
            "rollout_id": self.rollout_id,
            "n_samples": self.n_samples,
            "n_samples_measured": self.n_samples_measured,
            "n_tokens": self.metrics.n_tokens,
            **self.metrics.as_dict(),
            "findings": [
                {
                    "code": one.code,
                    "message": one.message,
                    "n_samples": len(one.samples),
                    "samples": list(one.samples[:_NAMED]),
                }
                for one in self.findings
            ],
            "verdict": self.verdict.as_dict(),
        }


def measure_payload(payload: Mapping[str, Any], path: Path, *, most_tokens: int = MOST_TOKENS) -> Measured:
    """Measure one dump as ``compare`` would, on the train side's own copy of the rollout's log-probs.

    Args:
        payload: a v2 payload.
        path: where it was written.
        most_tokens: above this number of response tokens, evenly spaced samples stand for all.
    """
    samples, total = payload["samples"], 0
    for sample in samples:
        total += whole_number(sample.get("response_lengths")) or 0
    step = max(1, -(-total // most_tokens))
    chosen = samples[::step]
    pairs = [_pair(i * step, sample) for i, sample in enumerate(chosen)]
    table = tabulate(pairs)
    rollout_id = payload["rollout_id"]
    source = RolloutDump(path, "rollout", rollout_id, [pair.rollout for pair in pairs])
    train = TrainDump((path,), "train-v2", 2, rollout_id, payload["rank"], list(chosen), payload["dp_shards"])
    n_shards = len(payload["dp_shards"])
    schedule = Schedule(
        missing=frozenset(), not_scheduled=frozenset(), n_covered=len(pairs), n_scheduled=None, shards=n_shards,
        n_shards=None, short=False,
    )  # fmt: skip
    join = Join(pairs, [], schedule)
    metrics = measure(table, trainer_version=train.provenance.weight_version)
    findings = diagnose(View(source, train, join, table)) if metrics.n_tokens else ()
    return Measured(
        rollout_id=rollout_id,
        n_samples=len(samples),
        n_samples_measured=len(chosen),
        metrics=metrics,
        findings=findings,
        verdict=judge(metrics, findings, n_joined=len(pairs)),
    )


def _pair(place: int, sample: dict[str, Any]) -> Pair:
    """A train sample beside what it holds of its rollout sample."""
    position = whole_number(sample.get("rollout_position"))
    source = {
        "index": whole_number(sample.get("sample_index")),
        "tokens": sample.get("tokens"),
        "response_length": sample.get("response_lengths"),
        "rollout_log_probs": sample.get("rollout_log_probs"),
        **({"loss_mask": sample["loss_masks"]} if "loss_masks" in sample else {}),
        "weight_versions": sample.get("weight_versions"),
    }
    return Pair(place if position is None else position, source["index"], sample, source, True)
