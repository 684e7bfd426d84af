"""The ratio of the log-probs is constant: the two sides divide the logits by different temperatures."""

from __future__ import annotations

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.evidence import View
from slime_instrument._analysis.fits import fit_models

CODE = "temperature"
ORDER = 80


def find(view: View) -> Finding | None:
    _, model = fit_models(view)
    if model is None:
        return None
    ratio = 1 + float(model.parameter[model.pairs].median())
    n = int(model.pairs.sum())
    message = (
        f"In {n} samples log π is {ratio:.4g} times log μ (this accounts for {model.explained:.0%} of the squares of "
        "the differences). One side scores at another temperature than the other: compare --rollout-temperature with "
        "what the engine was asked for."
    )
    if model.rival:
        message += " One constant per sample (truncated sampling) fits about as well."
    evidence = {"ratio": ratio, "explained": model.explained}
    return Finding(
        CODE, message, view.positions(model.pairs.nonzero().flatten()), evidence, view.tokens_of(model.pairs)
    )
