"""The one judgement on a comparison: shown by compare, report, view, live metrics and gates alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.evidence import View
from slime_instrument._analysis.metrics import Metrics

Level = Literal["ok", "nothing-compared", "unexplained", "fault"]
LEVELS: tuple[Level, ...] = ("ok", "nothing-compared", "unexplained", "fault")
"""From the best to the worst."""

KERNEL_NOISE = 0.125
"""Mean |δ| in nats that two sound implementations in bf16 can show: a logit between 16 and 32 is stored in steps of
0.125, so each of the two sides may be off by half a step."""

_OUTLIER = 0.5  # nats; a token that differs more, and 20 times more than 99 % of the others, is no noise
_LONELY = 20.0
_GROUP_TOKENS = 8  # a sample with fewer does not show in which group it is
_APART = 4.0  # between the groups' nearest samples mean |δ| grows at least this much


@dataclass(frozen=True)
class Verdict:
    """A judgement.

    Attributes:
        level: ``ok``; ``unexplained``: the sides differ more than kernels do, and no cause was shown; ``fault``: a
            finding; ``nothing-compared``: no token could be compared.
        text: the judgement in one line.
    """

    level: Level
    text: str

    def as_dict(self) -> dict[str, str]:
        return {"level": self.level, "text": self.text}


def fails(level: Level, fail_on: Level | Literal["never"]) -> bool:
    """Whether a verdict of this level fails a gate that fails from ``fail_on`` on. Having compared nothing counts as
    bad as not knowing why: no gate passes on it, save ``never``."""
    if fail_on == "never" or level == "ok":
        return False
    return level == "nothing-compared" or LEVELS.index(level) >= LEVELS.index(fail_on)


def unexplained(view: View, findings: Sequence[Finding]) -> Finding | None:
    """What is left and larger than noise: all samples, a group of them that differs from the others, or single tokens.

    Measured against :data:`KERNEL_NOISE`, at the tokens of samples that no finding names.

    Args:
        view: the comparison.
        findings: what is explained already.
    """
    named = {position for one in findings for position in one.samples}
    rest = torch.tensor([pair.position not in named for pair in view.table.pairs], dtype=torch.bool)
    counts = torch.where(rest, view.counts, torch.zeros_like(view.counts))
    n = int(counts.sum())
    if not n:
        return None
    sizes = torch.where(rest, view.pair_sums.size, torch.zeros_like(view.pair_sums.size))
    mean = float(sizes.sum()) / n
    group = outlying_group(view.mean_abs, counts)
    chosen = rest & (counts > 0)
    kind = "all"
    if group is not None:
        chosen, kind = group, "group"
    elif mean <= KERNEL_NOISE:
        lonely = _lonely_tokens(view, rest)
        if lonely is None:
            return None
        message, tokens, evidence = lonely
        return Finding("unexplained-mismatch", message, view.positions_with(tokens), evidence)
    own = float(sizes[chosen].sum() / counts[chosen].sum())
    signed = float(view.pair_sums.signed[chosen].sum() / counts[chosen].sum())
    of = int((counts > 0).sum())
    if kind == "group":
        others = chosen.logical_not() & (counts > 0)
        level = float(sizes[others].sum() / counts[others].sum())
        who = f"{int(chosen.sum())} of {of} samples are a group of their own: mean |δ| is {own:.3g} nats in them and "
        who += f"{level:.3g} in the others"
    else:
        level = None
        who = f"mean |δ| is {own:.3g} nats over {int(counts[chosen].sum())} tokens of {of} samples"
    message = (
        f"{who[0].upper()}{who[1:]}; rounding of bf16 logits on both sides explains up to {KERNEL_NOISE:.3g}. No known "
        f"cause fits. Mean δ is {signed:+.3g}."
    )
    evidence = {
        "kind": kind, "mean_abs": own, "mean": signed, "kernel_noise": KERNEL_NOISE, "mean_abs_of_others": level,
        "n_tokens": int(counts[chosen].sum()),
    }  # fmt: skip
    return Finding("unexplained-mismatch", message, view.positions(chosen.nonzero().flatten()), evidence)


def outlying_group(mean_abs: torch.Tensor, counts: torch.Tensor) -> torch.Tensor | None:
    """Samples whose mean \\|δ\\| is of another size than the others': bool, shape ``(S,)``; None if all are alike.

    The samples fall into two groups where, in order of their mean, the largest step is at least :data:`_APART` times,
    and the lower end of the upper group is more than kernels explain.

    Args:
        mean_abs, counts: of each sample, float64, shape ``(S,)``; samples without tokens take no part.
    """
    usable = (counts >= _GROUP_TOKENS).nonzero().flatten()
    if len(usable) < 2:
        return None
    order = usable[mean_abs[usable].argsort()]
    means = mean_abs[order].clamp(min=1e-6)
    steps = means[1:] / means[:-1]
    # Two samples next to zero are alike, however large their ratio is.
    steps = torch.where(means[1:] > KERNEL_NOISE, steps, torch.ones_like(steps))
    at = int(steps.argmax())
    if float(steps[at]) < _APART:
        return None
    group = torch.zeros(len(mean_abs), dtype=torch.bool)
    group[order[at + 1 :]] = True
    return group


def _lonely_tokens(view: View, rest: torch.Tensor) -> tuple[str, torch.Tensor, dict[str, Any]] | None:
    """Single tokens that differ by much more than nearly all others."""
    tokens = view.open & rest.repeat_interleave(view.table.lengths)
    size = torch.where(tokens, (view.table.train - view.table.rollout).abs(), 0.0)
    values = size[tokens]
    if not len(values):
        return None
    usual = float(values.sort().values[min(len(values) - 1, int(0.99 * len(values)))])
    limit = max(_OUTLIER, _LONELY * usual)
    found = size > limit
    n = int(found.sum())
    if not n:
        return None
    largest = float(values.max())
    message = (
        f"{n} of {len(values)} tokens stand out: |δ| is up to {largest:.3g} nats there, and at most {usual:.3g} at "
        "99 % of the tokens. No known cause fits."
    )
    return message, found, {"kind": "tokens", "n_tokens": n, "max_abs": largest, "p99": usual}


def judge(metrics: Metrics, findings: Sequence[Finding], *, n_joined: int, why_nothing: str = "") -> Verdict:
    """The verdict on one comparison.

    Args:
        metrics, findings: of the comparison, :func:`unexplained` included.
        n_joined: samples that were joined.
        why_nothing: why no token could be compared, in words.
    """
    codes = list(dict.fromkeys(one.code for one in findings))
    known = [code for code in codes if code != "unexplained-mismatch"]
    size = f"mean |δ| {metrics.abs_diff.mean:.3g} over {metrics.n_tokens} tokens" if metrics.n_tokens else ""
    if not metrics.n_tokens:
        text = f"nothing was compared: {why_nothing or 'there are no tokens'}"
        if known:
            text += f"; found: {', '.join(known)}"
        return Verdict("nothing-compared", text)
    if known:
        return Verdict("fault", f"fault: {', '.join(codes)}; {size}")
    if codes:
        return Verdict("unexplained", f"unexplained: differs more than kernels do, cause not shown; {size}")
    return Verdict("ok", f"ok: no finding; {size} of {n_joined} samples")


def judge_all(verdicts: Sequence[Verdict], names: Sequence[str]) -> Verdict:
    """The verdict on several rollouts: the worst one, with how many have it and the first of them."""
    if not verdicts:
        return Verdict("nothing-compared", "nothing was compared: there are no pairs of dumps")
    if len(verdicts) == 1:
        return verdicts[0]
    worst = max(verdicts, key=lambda one: LEVELS.index(one.level))
    concerned = [name for one, name in zip(verdicts, names, strict=True) if one.level == worst.level]
    if worst.level == "ok":
        return Verdict("ok", f"ok: no finding in {len(verdicts)} rollouts")
    return Verdict(
        worst.level, f"{worst.level} in {len(concerned)} of {len(verdicts)} rollouts; {concerned[0]}: {worst.text}"
    )
