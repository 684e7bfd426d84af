"""The demonstration: train twice, and say in figures what agrees.

The first pass runs in a single process. Its log-probs, with noise such as an inference engine's kernels would add,
become the rollout's log-probs of the second pass, which trains in the layout that was asked for. So train and rollout
nearly agree, as in a healthy run, and the parallel layout can be held against the single process.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_instrument._errors import five_parts
from slime_instrument.lab._faults import FAULTS, parse_fault
from slime_instrument.lab._logprobs import rollout_log_probs_from
from slime_instrument.lab._options import LabError, LabOptions, LabResult
from slime_instrument.lab._training import train

_SIMULATED = "no engine ran: training's own from a single process, plus seeded noise"
# The first pass is the demonstration's own: every rollout of it is needed, whatever the user's job should keep.
_EVERY_DUMP = {
    "SLIME_INSTRUMENT_EVERY": "1",
    "SLIME_INSTRUMENT_KEEP_LAST": "",
    "SLIME_INSTRUMENT_PIN": "",
    "SLIME_INSTRUMENT_ASYNC_WRITE": "0",
    "SLIME_INSTRUMENT_ALERT": "",
}


@dataclass(frozen=True)
class DemoResult:
    target: str
    slime_version: str | None
    layout: dict[str, int]
    train_dumps: list[Path]
    rollout_dumps: list[Path]
    patches: list[dict[str, Any]]
    seconds: dict[str, float]
    agreement: dict[str, Any]
    """``n_samples``, ``n_tokens`` (trained ones, not masked), ``layout_max_abs_diff`` (log-probs of this layout
    against the single process, over all response tokens; ``layout_max_abs_diff_per_rollout`` in order) and
    ``rollout_mean_abs_diff`` (train against rollout log-probs, over the trained tokens), ``rollout_log_probs`` (where
    these come from, in words). With a planted fault the layouts are not compared."""
    report: Path | None
    """The page about this run; None where there is none, and ``report_note`` says why."""
    report_note: str
    """The verdict of the report in a sentence, or why there is no report."""


def demo(
    out: Path,
    *,
    slime: Path | None = None,
    tp: int = 1,
    pp: int = 1,
    cp: int = 2,
    dp: int = 2,
    rollouts: int = 2,
    fault: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> DemoResult:
    """Train into ``out/train_data`` and ``out/rollout_data`` and compare; raises LabError if anything failed.

    ``fault`` plants one, ``NAME`` or ``NAME:VALUE`` (see ``slime_instrument.lab.FAULTS``), so that its picture can be
    seen.
    """
    planted = parse_fault(fault)
    kind = FAULTS[planted.name] if planted else None
    began = time.monotonic()
    say = progress or (lambda _text: None)
    with tempfile.TemporaryDirectory(prefix="slime-instrument-demo-") as scratch:
        single = LabOptions(
            out=Path(scratch) / "single",
            slime=slime,
            rollouts=rollouts,
            environment=_EVERY_DUMP,
            fault=fault if kind and kind.in_engine else None,
        )
        first = train(single, progress=lambda text: say(f"single process: {text}"))
        _expect_a_dump(first)
        log_probs = rollout_log_probs_from(first.train_dumps, Path(scratch) / "rollout_log_probs.pt")
        name = f"TP{tp} PP{pp} CP{cp} DP{dp}"
        options = LabOptions(
            out=out,
            slime=slime,
            tp=tp,
            pp=pp,
            cp=cp,
            dp=dp,
            rollouts=rollouts,
            rollout_log_probs=log_probs,
            fault=fault if kind and kind.in_training else None,
        )
        second = train(options, progress=lambda text: say(f"{name}: {text}"))
        agreement = _compare(first.train_dumps, second.train_dumps, layouts_agree=fault is None)
        agreement["rollout_log_probs"] = _SIMULATED + (f"; planted fault: {fault}" if fault else "")
        say("writing the report")
        report, report_note = _report(out, second.rollout_dumps, second.train_dumps)
    return DemoResult(
        target=second.target,
        slime_version=second.slime_version,
        layout=second.layout,
        train_dumps=second.train_dumps,
        rollout_dumps=second.rollout_dumps,
        patches=second.patches,
        seconds={
            "single_process": first.seconds["total"],
            "layout": second.seconds["total"],
            "total": round(time.monotonic() - began, 2),
        },
        agreement=agreement,
        report=report,
        report_note=report_note,
    )


def _report(out: Path, rollouts: Iterable[Path], trained: Iterable[Path]) -> tuple[Path | None, str]:
    """The page about the dumps of this run (what an earlier run left in ``out`` is not in it), and its verdict."""
    try:
        from slime_instrument._report.build import write_report

        written = write_report([*rollouts, *trained], out / "report.html")
    except ImportError as error:
        return None, f"No report.html: {error.name} is not installed (install slime-instrument[report])."
    return written.path, written.verdict.text


def _expect_a_dump(result: LabResult) -> None:
    if result.train_dumps:
        return
    unfit = [f"{p['name']} is {p['state']}: {p['reason']}" for p in result.patches if p["state"] == "INCOMPATIBLE"]
    raise LabError(
        five_parts(
            "lab demo",
            expected="a train dump of each rollout",
            found=f"none ({'; '.join(unfit)})" if unfit else "none",
            follows="Nothing can be compared.",
            next_step="slime-instrument check --slime DIR says which part of this slime does not fit.",
        )
    )


def _compare(single: Iterable[Path], parallel: Iterable[Path], *, layouts_agree: bool) -> dict[str, Any]:
    import torch

    def rollouts(paths: Iterable[Path]) -> dict[int, list[dict[str, Any]]]:
        payloads = (torch.load(path, map_location="cpu", weights_only=True) for path in paths)
        return {payload["rollout_id"]: payload["samples"] for payload in payloads}

    reference, ours = rollouts(single), rollouts(parallel)
    # SLIME_INSTRUMENT_EVERY and KEEP_LAST may leave fewer.
    if not ours or not ours.keys() <= reference.keys():
        raise LabError(
            f"slime_instrument: lab demo: expected dumps among rollouts {sorted(reference)}, found {sorted(ours)}. "
            "Nothing can be compared."
        )
    between_layouts, from_rollout = [], []
    n_samples = 0
    for rollout_id, samples in sorted(ours.items()):
        largest = 0.0
        for sample, expected in zip(samples, reference[rollout_id], strict=True):
            n_samples += 1
            difference = (sample["log_probs"] - expected["log_probs"]).abs()
            largest = max(largest, difference.max().item() if difference.numel() else 0.0)
            trained = sample["loss_masks"]
            from_rollout.append((sample["log_probs"] - sample["rollout_log_probs"]).abs()[trained.bool()])
        between_layouts.append(largest)
    tokens = torch.cat(from_rollout)
    figures: dict[str, Any] = {"n_samples": n_samples, "n_tokens": tokens.numel()}
    if layouts_agree:
        figures["layout_max_abs_diff"] = max(between_layouts, default=0.0)
        figures["layout_max_abs_diff_per_rollout"] = between_layouts
    figures["rollout_mean_abs_diff"] = tokens.mean().item()
    return figures
