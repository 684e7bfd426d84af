"""One constant is added to every δ of a sample: sampling was renormalised over what survived top-p or top-k."""

from __future__ import annotations

import math

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.evidence import View
from slime_instrument._analysis.fits import fit_models

CODE = "truncated-sampling"
ORDER = 80


def find(view: View) -> Finding | None:
    model, _ = fit_models(view)
    if model is None:
        return None
    constants = model.parameter[model.pairs]
    typical = float(constants.median())
    n = int(model.pairs.sum())
    message = (
        f"In {n} samples δ is one constant (median {typical:+.3g} nats, range {float(constants.min()):+.3g} to "
        f"{float(constants.max()):+.3g}; it accounts for {model.explained:.0%} of the squares). "
    )
    if typical < 0:
        message += (
            f"The rollout's probabilities are those after top-p or top-k, with a surviving mass of about "
            f"{math.exp(typical):.3g}; training normalises over the whole vocabulary."
        )
    else:
        message += "The train side is normalised over fewer tokens than the rollout."
    if model.rival:
        message += " A constant ratio (temperature) fits about as well."
    evidence = {
        "constant": typical,
        "surviving_mass": math.exp(typical) if typical < 0 else None,
        "explained": model.explained,
    }
    return Finding(
        CODE, message, view.positions(model.pairs.nonzero().flatten()), evidence, view.tokens_of(model.pairs)
    )
