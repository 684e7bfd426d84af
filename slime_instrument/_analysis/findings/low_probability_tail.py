"""The mismatch stands only at tokens that the rollout thought very improbable."""

from __future__ import annotations

import torch

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.evidence import View

CODE = "low-probability-tail"
ORDER = 95
_LOW = -4.0  # log μ from which a token is improbable
_ENOUGH = 4  # outliers
_OUTLIER = 0.4  # |δ| in nats, and at least ten times what is usual
_WIDEST = 0.4  # share of the tokens that can be a tail
_IN_TAIL = 0.3  # share of the tail that is off
_ONE_SIDED = 0.9  # share of one sign from which a temperature fits too
_ELSEWHERE = 0.003  # share of the other tokens that may be off too


def find(view: View) -> Finding | None:
    size = view.size
    off = size > max(_OUTLIER, 10 * view.noise)
    if int(off.count_nonzero()) < _ENOUGH:
        return None
    rollout = view.rollout_values()
    # The tail ends where nearly all outliers are below.
    places = rollout[off].sort().values
    edge = float(places[min(len(places) - 1, int(0.98 * len(places)))])
    if edge > _LOW:
        return None
    tail = rollout <= edge
    n_tail, n_off = int(tail.sum()), int(off.sum())
    in_tail = int((off & tail).sum())
    elsewhere = (n_off - in_tail) / max(1, len(size) - n_tail)
    if n_tail > _WIDEST * len(size) or in_tail < _IN_TAIL * n_tail or elsewhere > _ELSEWHERE:
        return None
    mean_tail, mean_rest = float(size[tail].mean()), float(size[~tail].mean())
    if mean_tail < 8 * mean_rest:
        return None
    message = (
        f"{in_tail} of {n_off} outliers have log μ below {edge:.3g}; mean |δ| is {mean_tail:.3g} there and "
        f"{mean_rest:.3g} elsewhere. Kernels differ most where probabilities are tiny; larger than usual noise there "
        "points to a different attention, MoE or softmax kernel in the engine, or to a lower precision."
    )
    one_sided = max(
        float((view.delta[off & tail] > 0).double().mean()), float((view.delta[off & tail] < 0).double().mean())
    )
    tokens = torch.zeros_like(view.open)
    tokens[view.open] = off
    if one_sided > _ONE_SIDED:
        message += " Nearly all of these differences have one sign, as a different temperature would give them too."
    evidence = {
        "one_sided": one_sided,
        "edge": edge,
        "tokens": n_tail,
        "mean_abs": mean_tail,
        "mean_abs_elsewhere": mean_rest,
    }
    return Finding(CODE, message, view.positions(sorted(set(view.sample[off].tolist()))), evidence, tokens)
