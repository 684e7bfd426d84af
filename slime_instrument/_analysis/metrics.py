"""Mismatch metrics of one pair of dumps: what is measured, and the sums that it is made of, added up block by block.

δ = log π (train) - log μ (rollout) at the comparable tokens, ρ = exp δ. A value is None, never 0.0 or NaN, where there
is nothing to measure, and infinite where it exceeds what a float holds (JSON has null for that, and the metric's name
under ``overflowed``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from slime_instrument._analysis.blocks import Block
from slime_instrument._analysis.drift import Drift, DriftSums
from slime_instrument._analysis.statistics import percentiles
from slime_instrument._analysis.table import TOKEN_KINDS, TokenTable
from slime_instrument._format.schedule import group_of
from slime_instrument._format.values import integers, number, plain_value
from slime_instrument._thresholds import METRICS

_CLAMP = 20.0  # of the exponent of a sequence ratio, as in slime


@dataclass(frozen=True)
class Limits:
    """Parameters of the corrections; the defaults are those that slime's arguments and papers name.

    Attributes:
        tis: upper bound of a truncated weight.
        icepop: token weights outside become 0.
        geo: sequences whose geometric mean ratio is outside are dropped.
        veto: sequences with a token ratio below are dropped.
    """

    tis: float = 2.0
    icepop: tuple[float, float] = (0.5, 2.0)
    geo: tuple[float, float] = (0.99, 1.001)
    veto: float = 1e-4


@dataclass(frozen=True)
class AbsDiff:
    """\\|δ\\| in nats."""

    mean: float | None = None
    max: float | None = None
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


@dataclass(frozen=True)
class ProbDiff:
    """\\|π - μ\\|, and the Pearson correlation of π and μ (None where one does not vary)."""

    mean: float | None = None
    max: float | None = None
    std: float | None = None
    pearson: float | None = None


@dataclass(frozen=True)
class Tis:
    """Truncated importance sampling: w = min(ρ, limit)."""

    limit: float
    mean_weight: float
    clip_fraction: float
    mean_abs_rho_minus_1: float


@dataclass(frozen=True)
class IcePop:
    """w = ρ between the limits, else 0."""

    limits: tuple[float, float]
    mean_weight: float
    dropped_fraction: float


@dataclass(frozen=True)
class GeoRejection:
    """Sequences whose exp(mean δ) is outside the limits are dropped."""

    limits: tuple[float, float]
    dropped_fraction: float


@dataclass(frozen=True)
class Veto:
    """Sequences with some ρ below the limit are dropped."""

    limit: float
    dropped_fraction: float


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Every metric of one pair of dumps.

    Attributes:
        n_tokens: comparable tokens.
        abs_diff, prob_diff: distances on the scale of log-probs and on that of probabilities.
        ess: effective sample size of the token weights as a fraction of the tokens, (Σr)² / (N Σr²).
        k1, k2, k3: estimates of KL(μ‖π): mean -δ, δ²/2, ρ - δ - 1.
        token_mult_prob_error: mean exp \\|δ\\|.
        chi2_token, chi2_seq: mean ρ² - 1 over tokens; mean exp(2Σδ) - 1 over sequences.
        train_rollout_logprob_abs_diff: what slime logs under that name for these samples: Σ\\|δ\\| of each sample
            divided by the mask sum of its whole execution, added up, divided by the number of executions.
        seq_ratio, geo_ratio, ppl_ratio: means over sequences of exp Σδ (exponent clamped to ±20), exp(mean δ),
            exp(-mean δ).
        tis, icepop, geo_rs, veto: what these corrections would do; None without a comparable token.
        excluded: tokens by the kind for which they do not count; ``removed`` counts samples.
        drift: where the mismatch grows.
    """

    n_tokens: int
    abs_diff: AbsDiff = AbsDiff()
    prob_diff: ProbDiff = ProbDiff()
    ess: float | None = None
    k1: float | None = None
    k2: float | None = None
    k3: float | None = None
    token_mult_prob_error: float | None = None
    chi2_token: float | None = None
    chi2_seq: float | None = None
    train_rollout_logprob_abs_diff: float | None = None
    seq_ratio: float | None = None
    geo_ratio: float | None = None
    ppl_ratio: float | None = None
    tis: Tis | None = None
    icepop: IcePop | None = None
    geo_rs: GeoRejection | None = None
    veto: Veto | None = None
    excluded: Mapping[str, int]
    drift: Drift

    def value(self, name: str) -> float | None:
        """A metric by its dotted name; infinite where it exceeds what a float holds.

        Raises:
            KeyError: there is no metric of that name.
        """
        found: Any = self
        for part in name.split("."):
            if found is None:
                return None
            if isinstance(found, Mapping):
                found = found[part]
            elif hasattr(found, part):
                found = getattr(found, part)
            else:
                raise KeyError(name)
        if found is not None and not isinstance(found, (int, float)):
            raise KeyError(name)
        return found

    def flat(self) -> dict[str, float | None]:
        """Every metric that can be limited, under its dotted name; what exceeds a float is None."""
        return {name: plain_value(self.value(name)) for name in METRICS}

    def overflowed(self) -> list[str]:
        """Names of the metrics that exceed what a float holds."""
        values = ((name, self.value(name)) for name in METRICS)
        return [name for name, value in values if value is not None and not math.isfinite(value)]

    def as_dict(self) -> dict[str, Any]:
        """As plain values; what exceeds a float is None."""
        record: dict[str, Any] = plain_value({**asdict(self), "drift": None})
        del record["n_tokens"]
        return {**record, "drift": self.drift.as_dict(), "overflowed": self.overflowed()}


def measure(table: TokenTable, limits: Limits | None = None, *, trainer_version: int | None = None) -> Metrics:
    """Every metric of one pair of dumps.

    Args:
        table: the tokens.
        limits: parameters of the corrections.
        trainer_version: number of the weights that training started from, where the train dump knows it.
    """
    limits = limits or Limits()
    sums, weights, drift = _Sums(), _Weights(limits, len(table.lengths)), DriftSums(table, trainer_version)
    for block in filter(len, table.blocks()):
        sums.add(block)
        weights.add(block)
        drift.add(block)
    n, excluded = sums.n, table.excluded()
    if not n:
        return Metrics(n_tokens=0, excluded=excluded, drift=drift.result())
    p50, p95, p99 = percentiles(table.size, (0.50, 0.95, 0.99))
    pairs = table.pair_sums
    present = pairs.present
    counts, signed = pairs.counts[present], pairs.signed[present]
    geo = (signed / counts).exp()
    outside = (geo < limits.geo[0]) | (geo > limits.geo[1])
    return Metrics(
        n_tokens=n,
        abs_diff=AbsDiff(sums.size / n, sums.largest, p50, p95, p99),
        prob_diff=sums.prob_diff(),
        ess=_value(sums.weight.square() / (n * sums.weight_squares)),
        k1=_value(-sums.signed / n),
        k2=_value(sums.squares / 2 / n),
        k3=_value(sums.k3 / n),
        token_mult_prob_error=_value(sums.error / n),
        chi2_token=_value(sums.chi2 / n),
        chi2_seq=_value(torch.expm1(2 * signed).mean()),
        train_rollout_logprob_abs_diff=_as_slime_logs_it(table),
        seq_ratio=_value(signed.clamp(-_CLAMP, _CLAMP).exp().mean()),
        geo_ratio=_value(geo.mean()),
        ppl_ratio=_value((-signed / counts).exp().mean()),
        tis=Tis(limits.tis, *(_value(one / n) for one in (weights.truncated, weights.clipped, weights.off))),
        icepop=IcePop(limits.icepop, _value(weights.kept / n), _value(weights.dropped / n)),
        geo_rs=GeoRejection(limits.geo, _value(outside.double().mean())),
        veto=Veto(limits.veto, _value(weights.vetoed[present].double().mean())),
        excluded=excluded,
        drift=drift.result(),
    )


def _value(value: torch.Tensor | float) -> float:
    """A float, infinite where the result is no number: sums that exceed a float can cancel to NaN."""
    found = float(value)
    return math.inf if math.isnan(found) else found


def _as_slime_logs_it(table: TokenTable) -> float:
    """slime divides each sample's sum by the mask sum of its whole execution (of the sample itself in releases that do
    not store it), at least 1, and the total by the number of executions, masked ones included."""
    total, executions = 0.0, set()
    masked_in = table.counts_of(table.mask).tolist()
    for i, (pair, size) in enumerate(zip(table.pairs, table.pair_sums.size.tolist(), strict=True)):
        stated = number(pair.train.get("rollout_mask_sums", pair.train.get("group_mask_sums")))
        total += size / max(1.0, masked_in[i] if stated is None else stated)
        executions.add(group_of(i, pair.train))
    return total / len(executions)


class _Moments:
    """Number, means, and sums of products of deviations from the means, of two variables, added up part by part."""

    def __init__(self) -> None:
        self.n = 0
        self.mean = torch.zeros(2, dtype=torch.float64)
        self.products = torch.zeros(2, 2, dtype=torch.float64)

    def add(self, values: torch.Tensor) -> None:
        """``values``: float64, shape ``(2, k)``, k > 0; they are overwritten."""
        k = values.shape[1]
        mean = values.mean(1)
        values -= mean.unsqueeze(1)
        # Sums of squares would cancel; the deviations of two parts combine exactly (Chan, Golub and LeVeque).
        between = (mean - self.mean).outer(mean - self.mean) * (self.n * k / (self.n + k))
        self.products += values @ values.T + between
        self.mean += (mean - self.mean) * (k / (self.n + k))
        self.n += k


class _Sums:
    """What the distances and the estimates of divergences are made of, over all comparable tokens.

    ``weight`` and ``weight_squares`` are Σρ and Σρ², both scaled so that the largest ρ is 1.
    """

    def __init__(self) -> None:
        self.n = 0
        self.size = self.largest = self.largest_prob = 0.0
        self.signed, self.squares, self.k3, self.error, self.chi2 = torch.zeros(5, dtype=torch.float64)
        self.scale = -torch.inf
        self.weight = self.weight_squares = torch.zeros((), dtype=torch.float64)
        self.probs, self.prob_sizes = _Moments(), _Moments()

    def add(self, block: Block) -> None:
        """Take up a block that has comparable tokens."""
        delta, size = block.delta, block.size
        self.n += len(block)
        self.size += float(size.sum())
        self.largest = max(self.largest, float(size.max()))
        self.signed += delta.sum()
        self.squares += delta @ delta
        # The ratio less 1: for small δ ratio - 1 and δ cancel.
        self.k3 += (block.excess - delta).sum()
        self.error += size.exp().sum()
        self.chi2 += torch.expm1(2 * delta).sum()
        self._add_weights(delta)
        both = torch.stack([block.train, block.rollout]).double().exp_()
        distance = (both[0] - both[1]).abs_()
        self.largest_prob = max(self.largest_prob, float(distance.max()))
        self.prob_sizes.add(torch.stack([distance, distance]))
        self.probs.add(both)

    def _add_weights(self, delta: torch.Tensor) -> None:
        # Scaling all weights alike changes no effective size and keeps the largest from overflowing.
        scale = max(self.scale, float(delta.max()))
        weight = (delta - scale).exp_()
        shrunk = torch.tensor(self.scale - scale, dtype=torch.float64).exp()
        self.weight = self.weight * shrunk + weight.sum()
        self.weight_squares = self.weight_squares * shrunk.square() + weight @ weight
        self.scale = scale

    def prob_diff(self) -> ProbDiff:
        products = self.probs.products
        scale = math.sqrt(max(0.0, float(products[0, 0]) * float(products[1, 1])))
        pearson = float(products[0, 1]) / scale if scale > 0 else math.nan
        return ProbDiff(
            mean=_value(self.prob_sizes.mean[0]),
            max=_value(self.largest_prob),
            std=_value((self.prob_sizes.products[0, 0] / self.n).sqrt()),
            pearson=pearson if math.isfinite(pearson) else None,
        )


class _Weights:
    """What the corrections would do to tokens, as sums, and which pairs a veto would drop."""

    def __init__(self, limits: Limits, n_pairs: int) -> None:
        self.limits = limits
        self.vetoed = torch.zeros(n_pairs, dtype=torch.bool)
        self.truncated, self.clipped, self.off, self.kept, self.dropped = torch.zeros(5, dtype=torch.float64)

    def add(self, block: Block) -> None:
        """Take up a block that has comparable tokens."""
        rho, (low, high) = block.excess + 1, self.limits.icepop
        self.truncated += rho.clamp(max=self.limits.tis).sum()
        self.clipped += (rho > self.limits.tis).sum()
        self.off += block.excess.abs().sum()
        outside = (rho < low) | (rho > high)
        self.dropped += outside.sum()
        self.kept += rho.masked_fill(outside, 0.0).sum()
        if float(rho.min()) < self.limits.veto:
            self.vetoed[block.pairs] = block.sums((rho < self.limits.veto).double()) > 0


@dataclass(frozen=True)
class SampleMetrics:
    """Metrics of one joined sample; means are None where no token is comparable.

    Attributes:
        position: in the rollout.
        index: slime's own number of the sample, or None.
        response_length, n_tokens, masked: response tokens, those that are compared, those that are not trained.
        mean_abs, max_abs, mean: of \\|δ\\| and δ.
        removed: whether the rollout marked it with remove_sample.
        confirmed: whether both sides hold tokens, which are equal.
    """

    position: int
    index: int | None
    response_length: int
    n_tokens: int
    masked: int
    mean_abs: float | None
    max_abs: float | None
    mean: float | None
    removed: bool
    confirmed: bool


def per_sample(table: TokenTable) -> list[SampleMetrics]:
    """One record per joined sample."""
    sums = table.pair_sums
    counts = sums.counts
    columns = zip(
        table.pairs,
        table.lengths.tolist(),
        counts.long().tolist(),
        table.counts_of(table.kind == TOKEN_KINDS.index("masked")).tolist(),
        (sums.size / counts).tolist(),
        sums.largest.tolist(),
        (sums.signed / counts).tolist(),
        table.removed.tolist(),
        strict=True,
    )
    return [
        SampleMetrics(
            position=pair.position,
            index=pair.index,
            response_length=length,
            n_tokens=count,
            masked=hidden,
            mean_abs=mean if count else None,
            max_abs=top if count else None,
            mean=offset if count else None,
            removed=removed,
            confirmed=pair.confirmed,
        )
        for pair, length, count, hidden, mean, top, offset, removed in columns
    ]


@dataclass(frozen=True)
class WorstToken:
    """A token with a large \\|δ\\|.

    Attributes:
        position, index: of its sample.
        token: place in the response.
        token_id: None where not stored.
        rollout, train: its log-probs.
        abs_diff: \\|δ\\|.
    """

    position: int
    index: int | None
    token: int
    token_id: int | None
    rollout: float
    train: float
    abs_diff: float


def worst_tokens(table: TokenTable, n: int = 10) -> list[WorstToken]:
    """The tokens with the largest \\|δ\\|, those without any difference left out."""
    largest: list[tuple[float, int]] = []
    for block in table.blocks():
        size, chosen = block.size.topk(min(n, len(block)))
        where = chosen if block.chosen is None else block.chosen.nonzero().flatten()[chosen]
        largest += zip(size.tolist(), (where + block.tokens.start).tolist(), strict=True)
        largest = sorted(largest, key=lambda one: -one[0])[:n]
    worst = []
    for value, token in largest:
        if value == 0:
            break
        # The last pair that starts there: those before it have no tokens.
        i = int(torch.searchsorted(table.starts, token, right=True)) - 1
        pair, place = table.pairs[i], token - int(table.starts[i])
        tokens = integers(pair.train.get("tokens"))
        id_at = len(tokens) - int(table.lengths[i]) + place if tokens is not None else -1
        worst.append(
            WorstToken(
                position=pair.position,
                index=pair.index,
                token=place,
                token_id=int(tokens[id_at]) if tokens is not None and 0 <= id_at < len(tokens) else None,
                rollout=float(table.rollout[token]),
                train=float(table.train[token]),
                abs_diff=value,
            )
        )
    return worst
