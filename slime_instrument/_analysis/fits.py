"""Two one-parameter models of δ, fitted to each sample and to all: a constant, and a constant ratio of log-probs.

The ratio is judged on δ/\\|log μ\\|: kernel noise grows with \\|log μ\\|, and without the division one improbable token
would decide the fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from slime_instrument._analysis.blocks import Block
from slime_instrument._analysis.evidence import View
from slime_instrument._analysis.statistics import log_student_tail

__all__ = ["Model", "fit_models"]

_ENOUGH = 8  # tokens of one sample
_EXPLAINED = 0.75  # part of the squares that the parameter must take away in a sample
_EXPLAINED_OVERALL = 0.6  # and over all samples
_SURE = math.log(1e-6)  # after all samples had their chance
_RIVAL = 2.0  # a model whose squares are within this factor of the other's is said too
_FLOOR = 0.003  # nats per token that every kernel differs by; a model is no better for being closer than that
_CONSTANT, _RATIO = 0.015, 0.01  # smallest parameters worth a name
_CLOSE = 0.1  # nats per token that may remain
_FOLLOWED = 0.25  # part of the squares of log μ that may remain
_VISIBLE = 0.25  # |log μ| below which a ratio cannot be told from noise


@dataclass(frozen=True)
class Model:
    """A fitted model.

    Attributes:
        pairs: the samples that it explains, bool, shape ``(S,)``.
        parameter: of each sample, float64, shape ``(S,)``.
        explained: part of the sum of δ² over those samples that it takes away.
        rival: whether the other model explains some of the samples about as well.
    """

    pairs: torch.Tensor
    parameter: torch.Tensor
    explained: float
    rival: bool = False


@dataclass(frozen=True)
class _Fit:
    pairs: torch.Tensor
    parameter: torch.Tensor
    squares: torch.Tensor  # what remains of Σδ², per sample


def fit_models(view: View) -> tuple[Model | None, Model | None]:
    """The constant model and the ratio model; None for one that explains nothing, or less than the other one.

    The constant is added to δ. The ratio is log π / log μ = 1 + parameter.
    """
    if "models" not in view.memo:
        view.memo["models"] = _contest(view)
    models: tuple[Model | None, Model | None] = view.memo["models"]
    return models


def _contest(view: View) -> tuple[Model | None, Model | None]:
    if view.n_open < _ENOUGH:
        return None, None
    seen = (_Seen(len(view.table.lengths)), _Seen(len(view.table.lengths)))
    for block in view.blocks():
        visible = block.rollout.abs() >= _VISIBLE
        seen[0].add(block, block.delta, None)
        seen[1].add(block, (block.delta / block.rollout).where(visible, 0.0), visible)
    constant, ratio = _fit(view, seen[0], _CONSTANT), _fit(view, seen[1], _RATIO)
    if not bool(constant[0].any() or ratio[0].any()):
        return None, None
    total, *rests = torch.zeros(3, len(view.table.lengths), dtype=torch.float64)
    for block in view.blocks():
        total[block.pairs] = block.sums(block.delta.square())
        scales = (torch.ones(()), block.rollout)
        for rest, (_, parameter), scale in zip(rests, (constant, ratio), scales, strict=True):
            expected = parameter[block.pairs].repeat_interleave(block.counts) * scale
            rest[block.pairs] = block.sums((block.delta - expected).square())
    fits = (_Fit(*constant, rests[0]), _Fit(*ratio, rests[1]))
    floor = view.counts * _FLOOR**2
    near = [own.pairs & (own.squares <= _RIVAL * (other.squares + floor)) for own, other in (fits, fits[::-1])]
    clear = [mine & ~theirs for mine, theirs in (near, near[::-1])]
    union = near[0] | near[1]
    remains = [float(fit.squares[union].sum()) for fit in fits]
    for i, other in ((0, 1), (1, 0)):
        # Where one sample could be either, the other samples decide.
        if remains[i] > _RIVAL * (remains[other] + float(floor[union].sum())) and not bool(clear[i].any()):
            near[i] = torch.zeros_like(near[i])
    rival = bool((near[0] & near[1]).any())
    models: list[Model | None] = []
    for fit, pairs in zip(fits, near, strict=True):
        whole = float(total[pairs].sum())
        rest = float(fit.squares[pairs].sum())
        explained = 1 - rest / whole if whole > 0 else 0.0
        named = bool(pairs.any()) and explained > 0.5 and _follows(rest, view, pairs)
        models.append(Model(pairs, fit.parameter, explained, rival) if named else None)
    return models[0], models[1]


def _follows(rest: float, view: View, pairs: torch.Tensor) -> bool:
    """Whether the train side follows the rollout but for the parameter. Values that have nothing to do with each other
    differ by a constant on average, too."""
    rollout = view.table.rollout[view.open & view.tokens_of(pairs)]
    varies = float((rollout - rollout.mean()).square().sum(dtype=torch.float64))
    return rest <= max(_CLOSE**2 * len(rollout), _FOLLOWED * varies)


class _Seen:
    """Number, sum and sum of squares of a quantity in each pair: float64, shape ``(S,)``."""

    def __init__(self, n_pairs: int) -> None:
        self.n, self.total, self.squares = torch.zeros(3, n_pairs, dtype=torch.float64)

    def add(self, block: Block, x: torch.Tensor, usable: torch.Tensor | None) -> None:
        """Take up a block; ``x`` is 0 where it is not ``usable`` (None: all are)."""
        self.n[block.pairs] = block.counts.double() if usable is None else block.sums(usable.double())
        self.total[block.pairs] = block.sums(x)
        self.squares[block.pairs] = block.sums(x.square())


def _fit(view: View, seen: _Seen, smallest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs in which what was ``seen`` is a constant and some noise, and the constant of each pair."""
    n, total, squares, n_pairs = seen.n, seen.total, seen.squares, len(seen.n)
    mean = torch.where(n > 0, total / n.clamp(min=1), 0.0)
    found = (n >= _ENOUGH) & (mean.abs() >= smallest) & _explains(n, mean, squares, _EXPLAINED, n_pairs)
    all_n, all_squares = n.sum().reshape(1), squares.sum().reshape(1)
    all_mean = total.sum().reshape(1) / all_n.clamp(min=1)
    overall = bool(_explains(all_n, all_mean, all_squares, _EXPLAINED_OVERALL, 1))
    if overall and abs(float(all_mean)) >= smallest and int(all_n) >= 2 * _ENOUGH:
        # Short samples cannot tell alone, but all of them have the same constant.
        mean = torch.where(found, mean, all_mean.expand(n_pairs))
        found = view.counts > 0
    return found, mean


def _explains(n: torch.Tensor, mean: torch.Tensor, squares: torch.Tensor, least: float, chances: int) -> torch.Tensor:
    by_mean = n * mean.square()
    share = torch.where(squares > 0, by_mean / squares.clamp(min=1e-300), 0.0)
    t = (share / (1 - share).clamp(min=1e-12) * (n - 1).clamp(min=0)).sqrt()
    return (share >= least) & (log_student_tail(t, n - 1) + math.log(max(1, chances)) < _SURE)
