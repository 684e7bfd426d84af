"""What is asked of one cell: a list of named checks, each with what it found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from slime_instrument._format.schema import PROVENANCE
from slime_instrument._hooks.capture import LOCAL_KEY, POSITION_KEY
from slime_instrument._validate import validate_files
from tools.matrix.agreement import check_agrees, probed
from tools.matrix.compare import ADVANTAGE_FIELDS, differences, from_native, from_single, no_prompt
from tools.matrix.layouts import LAYOUTS
from tools.matrix.plan import MINIATURE, RELEASES, Cell
from tools.matrix.recipes import RECIPES
from tools.matrix.runs import Outcome, Runs
from tools.matrix.shards import from_shards

_SHOWN = 5
#: Metrics that are clocks; everything else must be what it is without us.
_CLOCKS = ("perf/", "time", "throughput")


@dataclass
class Verdict:
    """``status``: ok, failed, slime-cannot, absent. ``checks``: name -> "ok" or what was found there."""

    status: str
    checks: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    reason: str | None = None


def judge(cell: Cell, runs: Runs) -> Verdict:
    """Compare the runs of ``cell``, all of which must have been made."""
    subject, plain = _made(runs, cell.subject), _made(runs, cell.plain)
    if plain.error is not None and cell.release == MINIATURE:
        return Verdict("absent", reason=f"the miniature has no such part: {plain.error}")
    if plain.error is not None:
        same = subject.error_type == plain.error_type
        verdict = Verdict("slime-cannot" if same else "failed", reason=plain.error)
        verdict.checks["same error with us"] = "ok" if same else f"{subject.error} against {plain.error}"
        return verdict
    if subject.error is not None:
        return Verdict("failed", {"trains": subject.error}, reason=subject.error)
    try:
        payload = _load(subject)
    except ValueError as error:
        return Verdict("failed", {"one dump": str(error)}, reason=str(error))
    verdict = Verdict("ok")
    question = _Question(cell, runs, subject, plain, payload, verdict.figures)
    for name, ask in CHECKS.items():
        found = ask(question)
        if found is None:
            continue
        shown = list(islice(found, _SHOWN + 1))
        more = "; and more" if len(shown) > _SHOWN else ""
        verdict.checks[name] = "; ".join(shown[:_SHOWN]) + more if shown else "ok"
    failed = [name for name, text in verdict.checks.items() if text != "ok"]
    if failed:
        verdict.status, verdict.reason = "failed", f"{failed[0]}: {verdict.checks[failed[0]]}"
    return verdict


@dataclass(frozen=True)
class _Question:
    cell: Cell
    runs: Runs
    subject: Outcome
    plain: Outcome
    payload: dict[str, Any]
    figures: dict[str, float]

    @property
    def cp(self) -> int:
        return LAYOUTS[self.cell.layout].cp


def _against_single(q: _Question) -> list[str] | None:
    if q.cell.single is None:
        return None
    single = _made(q.runs, q.cell.single)
    if single.error is not None:
        assert q.cell.single_plain is not None
        without = q.runs.get(q.cell.single_plain)
        if without is not None and without.error_type == single.error_type:
            return None  # nothing to compare with: slime itself cannot train this in one process
        return [f"the single process: {single.error}"]
    if single.train_dumps == []:
        return ["the single process left no dump"]
    recipe = RECIPES[q.cell.recipe]
    found, q.figures["log_probs"] = from_single(
        q.payload,
        _load(single),
        tolerance=recipe.tolerance,
        exact=recipe.exact,
        cp=q.cp,
        apart=ADVANTAGE_FIELDS if recipe.advantages_follow_layout else (),
    )
    return found


def _against_slimes_own(q: _Question) -> Iterator[str] | None:
    """With and without us: slime's native file, or every value in its per-rank files."""
    files = q.plain.train_dumps
    if [path.name for path in files] == ["0.pt"]:
        return from_native(q.payload, _load(q.plain), q.cp)
    return from_shards(q.payload, files, LAYOUTS[q.cell.layout])


def _against_native(q: _Question) -> Iterator[str] | None:
    native = None if q.cell.native is None else q.runs.get(q.cell.native)
    if native is None:
        return None
    return iter([f"native: {native.error}"]) if native.error else from_native(q.payload, _load(native), q.cp)


def _against_recomputed(q: _Question) -> Iterator[str] | None:
    """What was captured in training is what slime computes beforehand when it is made to."""
    other = None if q.cell.recomputed is None else q.runs.get(q.cell.recomputed)
    sources = {shard[PROVENANCE]["fields"].get("log_probs") for shard in q.payload["dp_shards"]}
    if other is None or other.error is not None or sources != {"captured"}:
        return None
    if [path.name for path in other.train_dumps] == ["0.pt"]:
        theirs = _load(other)
        ours = {"samples": [{"log_probs": sample["log_probs"]} for sample in q.payload["samples"]]}
        return differences(ours, {"samples": [{"log_probs": sample["log_probs"]} for sample in theirs["samples"]]})
    return (text for text in from_shards(q.payload, other.train_dumps, LAYOUTS[q.cell.layout]) if " log_probs" in text)


def _weights(q: _Question) -> Iterator[str]:
    if len(q.plain.weights) != LAYOUTS[q.cell.layout].world:
        yield f"weights of {len(q.plain.weights)} rank(s) were saved"
    yield from differences(q.subject.weights, q.plain.weights, "rank")


def _metrics(q: _Question) -> Iterator[str]:
    if not any("train/loss" in metrics for metrics in q.plain.metrics):
        yield "no loss is logged without us"
    for metrics in q.subject.metrics:
        for key in metrics:
            if key.endswith((f"/{POSITION_KEY}", f"/{LOCAL_KEY}")):
                yield f"{key} is logged"
    yield from differences(_without_clocks(q.subject.metrics), _without_clocks(q.plain.metrics))


def _provenance(q: _Question) -> Iterator[str]:
    recipe = RECIPES[q.cell.recipe]
    expected = "reconstructed" if q.cell.release == RELEASES[0] else "partition"
    for shard in q.payload["dp_shards"]:
        told = shard[PROVENANCE]
        if told["positions"] != expected:
            yield f"positions are {told['positions']}, not {expected}"
        if recipe.dump_lacks_log_probs and "log_probs" not in told:
            yield "says nothing about the missing log-probs"
        if not recipe.dump_lacks_log_probs and told["fields"].get("log_probs") not in ("captured", "recomputed"):
            yield f"log_probs come from {told['fields'].get('log_probs')}"


def _log_probs_complete(q: _Question) -> Iterator[str]:
    lacking = RECIPES[q.cell.recipe].dump_lacks_log_probs
    for sample in q.payload["samples"]:
        where = f"sample {sample.get('rollout_position')}"
        if lacking or "log_probs" not in sample:
            if lacking != ("log_probs" not in sample):
                yield f"{where}: log_probs {'missing' if 'log_probs' not in sample else 'there'}"
            continue
        unowned = int(no_prompt(sample) and q.cp > 1 and sample["response_lengths"] > 0)
        if not torch.isfinite(sample["log_probs"][unowned:]).all():
            yield f"{where}: log_probs are not finite"


def _positions(q: _Question) -> Iterator[str]:
    """The position is the one in the rollout dump, told by the tokens."""
    rollout = torch.load(q.subject.rollout_dump, weights_only=False)["samples"]
    for sample in q.payload["samples"]:
        position = sample["rollout_position"]
        if list(rollout[position]["tokens"]) != [int(token) for token in sample["tokens"]]:
            yield f"sample at position {position} has other tokens than the rollout's"


def _valid(q: _Question) -> list[str]:
    report = validate_files([q.subject.train_dumps[0]], rollout=q.subject.rollout_dump, allow_pickle=True)
    return [f"{finding.code}: {finding.message}" for finding in report.errors]


def _patches(q: _Question) -> list[str]:
    bad = ("INCOMPATIBLE", "FAILED", "DRIFTED")
    return [
        f"{patch['name']} is {patch['state']}: {patch['reason']}"
        for patch in q.subject.patches
        if patch["state"] in bad
    ]


def _as_checked(q: _Question) -> Iterator[str] | None:
    """``slime-instrument check``, which only reads the checkout, says of each patch what the run says."""
    source = q.runs.sources.get(q.cell.release)
    return None if source is None else check_agrees(probed(source), q.subject.patches)


def _uneven(q: _Question) -> list[str] | None:
    if q.cell.samples != "uneven" or LAYOUTS[q.cell.layout].dp == 1:
        return None
    counts = [len(shard["sample_indices"]) for shard in q.payload["dp_shards"]]
    return [] if len(set(counts)) > 1 else [f"every data-parallel rank has {counts[0]} samples"]


CHECKS: dict[str, Callable[[_Question], Any]] = {
    "as the single process": _against_single,
    "as slime's own file": _against_slimes_own,
    "as native slime": _against_native,
    "captured as recomputed": _against_recomputed,
    "weights untouched": _weights,
    "metrics untouched": _metrics,
    "provenance": _provenance,
    "log-probs complete": _log_probs_complete,
    "positions": _positions,
    "validates": _valid,
    "patches": _patches,
    "check agrees": _as_checked,
    "uneven indeed": _uneven,
}


def _made(runs: Runs, run: Any) -> Outcome:
    outcome = runs.get(run)
    if outcome is None:
        raise LookupError(f"{run} was not made")
    return outcome


def _load(outcome: Outcome) -> dict[str, Any]:
    """The only train dump; ValueError naming what is there instead."""
    names = [path.name for path in outcome.train_dumps]
    if names != ["0.pt"]:
        raise ValueError(f"expected 0.pt alone in train_data, found {', '.join(names) or 'nothing'}")
    payload: dict[str, Any] = torch.load(outcome.train_dumps[0], weights_only=True)
    return payload


def _without_clocks(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    stray = f"rollout/{POSITION_KEY}"  # of slime's own since its pull request 2266
    kept = ({k: v for k, v in one.items() if k != stray and not any(c in k for c in _CLOCKS)} for one in metrics)
    return [one for one in kept if one]
