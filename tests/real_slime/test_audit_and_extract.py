"""Audits, gradients and extracts against what real slime computes in its own training."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._analysis.audit import audit
from slime_instrument._analysis.gradient import loss_gradient
from slime_instrument._analysis.pair import ReadPair, read_pair
from slime_instrument._extract import extract, open_source
from slime_instrument._format.pairs import FilePair
from slime_instrument.lab import LabError, LabOptions, LabResult, find_sources, train_all
from tests.conftest import CHECKOUT
from tools.matrix.plan import OLD_CORE
from tools.matrix.recipes import RECIPES

pytestmark = pytest.mark.real_slime

HERE = Path(__file__).parent


def further(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.full) for name in names]


RELEASES = [CHECKOUT, *further("v0.2.2", "v0.2.4", "v0.3.0", "main")]


@dataclass(frozen=True)
class Recipe:
    """What slime is told. ``not_in``: releases whose loss fails with it."""

    overrides: Mapping[str, Any]
    with_ref: bool = False
    extras: tuple[str, ...] = ()
    samples: str = "default"
    dp: int = 1
    not_in: tuple[str, ...] = ()


ESTIMATORS = {
    "grpo": Recipe({}),
    "grpo without std": Recipe({"grpo_std_normalization": False}),
    "grpo raw": Recipe({"rewards_normalization": False}),
    "gspo": Recipe({"advantage_estimator": "gspo"}),
    "reinforce++": Recipe(
        {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.97, "kl_coef": 0.05}, with_ref=True
    ),
    "reinforce++ baseline": Recipe(
        {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.05, "kl_loss_type": "k2"}, with_ref=True
    ),
    "ppo": Recipe(
        {
            "advantage_estimator": "ppo",
            "use_critic": True,
            "gamma": 0.98,
            "lambd": 0.9,
            "value_clip": 0.2,
            "kl_coef": 0.05,
        },
        with_ref=True,
        extras=("critic-values",),
        samples="long",
    ),
    "whitened": Recipe({"normalize_advantages": True}, dp=2),
    "kl in the reward": Recipe({"kl_coef": 0.05, "kl_loss_type": "k1"}, with_ref=True),
}
ROLLOUT = {"use_rollout_logprobs": True}
BEFORE_0_3 = ("v0.2.2", "v0.2.4")
LOSSES = {
    "grpo": Recipe({}),
    "two ranks": Recipe({}, dp=2),
    "rollout log-probs": Recipe(ROLLOUT),
    "gspo": Recipe({"advantage_estimator": "gspo", **ROLLOUT, "eps_clip": 0.9, "eps_clip_high": 2.0}),
    "tis": Recipe({"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.3, "use_rollout_logprobs": False}),
    "tis, rollout log-probs": Recipe(
        {"use_tis": True, "tis_clip": 2.0, "tis_clip_low": 0.3, **ROLLOUT}, not_in=BEFORE_0_3
    ),
    "mismatch metrics": Recipe({"get_mismatch_metrics": True, "tis_clip": 2.0, "tis_clip_low": 0.0}),
    "opsm": Recipe({"use_opsm": True, "opsm_delta": 0.1, **ROLLOUT}),
    "kl in the loss": Recipe({"use_kl_loss": True, "kl_loss_coef": 0.1}, with_ref=True),
    "tokens alike": Recipe({"calculate_per_token_loss": True, **ROLLOUT}),
    "fan-out": Recipe({}, samples="uneven", not_in=BEFORE_0_3),
}


def trained(out: Path, release: str, recipes: Mapping[str, Recipe], **options: Any) -> dict[str, LabResult]:
    """One run for each recipe, in one interpreter."""
    slime = next((source for source in find_sources() if source.name == release), None)
    if slime is None:
        pytest.skip(f"no slime checkout named {release}")
    if release in OLD_CORE and not os.environ.get("SLIME_OLD_CORE"):
        pytest.skip(f"slime {release} needs megatron-core 0.14.0: set SLIME_OLD_CORE")
    runs = [
        LabOptions(
            out=out / name.replace(" ", "-"),
            slime=slime,
            overrides=recipe.overrides,
            with_ref=recipe.with_ref,
            extras=recipe.extras,
            samples=recipe.samples,
            dp=recipe.dp,
            **options,
        )
        for name, recipe in recipes.items()
        if release not in recipe.not_in
    ]
    results: dict[str, LabResult] = {}
    trained_ones = [name for name, recipe in recipes.items() if release not in recipe.not_in]
    for name, result in zip(trained_ones, train_all(runs), strict=True):
        if isinstance(result, LabError):
            raise result
        results[name] = result
    return results


def pair_of(result: LabResult) -> ReadPair:
    return read_pair(FilePair(0, result.rollout_dumps[0], (result.train_dumps[0],)), compact=False)


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, ReadPair]]:
    known: dict[str, dict[str, ReadPair]] = {}

    def made(release: str) -> dict[str, ReadPair]:
        if release not in known:
            results = trained(tmp_path_factory.mktemp("audited"), release, ESTIMATORS)
            known[release] = {name: pair_of(result) for name, result in results.items()}
        return known[release]

    return made


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("recipe", ESTIMATORS)
def test_what_slime_trained_with_is_what_the_audit_works_out(
    audited: Callable[[str], dict[str, ReadPair]], release: str, recipe: str
) -> None:
    pair = audited(release)[recipe]
    result = audit(pair)
    assert result.findings == ()
    fields = {"rewards", "kl", "returns", "advantages"} & set(pair.train.samples[0])
    assert set(result.checked) == fields >= {"rewards", "returns", "advantages"}
    # Not vacuous: the same with every value moved is found, field by field.
    for name in fields:
        moved = [{**one.train, name: one.train[name] + 0.1} for one in pair.joined.pairs]
        joined = [
            type(one)(one.position, one.index, sample, one.rollout, one.confirmed)
            for one, sample in zip(pair.joined.pairs, moved, strict=True)
        ]
        other = ReadPair(
            pair.rollout,
            pair.train,
            type(pair.joined)(joined, pair.joined.unmatched, pair.joined.schedule),
        )
        assert audit(other).findings, name


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, LabResult]]:
    known: dict[str, dict[str, LabResult]] = {}

    def made(release: str) -> dict[str, LabResult]:
        if release not in known:
            hook = f"{HERE / 'observe_gradients.py'}:install"
            known[release] = trained(tmp_path_factory.mktemp("observed"), release, LOSSES, rank_hook=hook)
        return known[release]

    return made


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("recipe", LOSSES)
def test_derivatives_are_those_that_autograd_gives_through_slimes_loss(
    observed: Callable[[str], dict[str, LabResult]], release: str, recipe: str
) -> None:
    if release in LOSSES[recipe].not_in:
        pytest.skip(f"slime {release} cannot train this")
    result = observed(release)[recipe]
    pair = pair_of(result)
    mine = loss_gradient(pair)
    assert mine.unknown == {}
    folder = result.train_dumps[0].parents[1] / "gradients"
    theirs = {tuple(tokens): gradient for file in folder.iterdir() for tokens, gradient in torch.load(file)}
    scale = float(LOSSES[recipe].dp)  # Megatron's average over data-parallel ranks undoes it
    if LOSSES[recipe].overrides.get("calculate_per_token_loss"):
        # Megatron divides by the number of tokens after the backward pass.
        scale = sum(max(1.0, float(torch.as_tensor(one.train["loss_masks"]).sum())) for one in pair.joined.pairs)
    assert len(mine.tokens) == len(theirs) == len(pair.train.samples)
    for one in pair.joined.pairs:
        expected = theirs[tuple(torch.as_tensor(one.train["tokens"]).tolist())].double()
        torch.testing.assert_close(mine.tokens[one.position] * scale, expected, rtol=1e-4, atol=1e-7)
    assert any(bool((gradient != 0).any()) for gradient in theirs.values())
    assert sum(share.share for share in mine.shares) == pytest.approx(1.0)


@pytest.mark.parametrize("release", [*RELEASES, *further("v0.2.0", "v0.2.1", "v0.2.3", "v0.3.1")])
def test_an_extract_is_trained_as_it_was_in_the_whole_run(release: str, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", release, {"grpo": ESTIMATORS["grpo"]})["grpo"]
    pair = pair_of(whole)
    source = open_source(whole.rollout_dumps[0], pair)
    small = extract(source, [2, 7], tmp_path / "mini.pt")
    assert small.positions == (2, 3, 6, 7)
    assert small.warnings == ()
    told = small.arguments
    overrides = {
        "rollout_batch_size": int(told["--rollout-batch-size"]),
        "n_samples_per_prompt": int(told["--n-samples-per-prompt"]),
    }
    again = trained(
        tmp_path / "again",
        release,
        {"grpo": Recipe(overrides)},
        plugin=HERE / "train_these_samples.py",
        environment={"EXTRACT": told["--load-debug-rollout-data"]},
    )["grpo"]
    repeated = pair_of(again)
    assert len(repeated.train.samples) == 4
    by_position = {one.position: one.train for one in pair.joined.pairs}
    for position, one in zip(small.positions, repeated.joined.pairs, strict=True):
        before = by_position[position]
        assert torch.equal(torch.as_tensor(one.train["tokens"]), torch.as_tensor(before["tokens"]))
        assert torch.equal(one.train["advantages"], before["advantages"])
        assert torch.equal(one.train["log_probs"], before["log_probs"])


@pytest.mark.full
def test_no_recipe_of_the_matrix_has_a_finding(tmp_path: Path) -> None:
    recipes = {
        name: Recipe(one.overrides, one.with_ref, one.extras, one.samples, dp=2)
        for name, one in RECIPES.items()
        if one.until is None and name != "rollout-routing-replay"
    }
    results = trained(tmp_path, CHECKOUT, recipes, cp=2)
    assert len(results) == len(recipes) > 20
    found = {name: audit(pair_of(result)).findings for name, result in results.items()}
    assert {name: findings for name, findings in found.items() if findings} == {}


@pytest.mark.full
def test_a_release_that_whitens_each_context_parallel_rank_alone_is_told(tmp_path: Path) -> None:
    result = trained(tmp_path, "v0.3.1", {"whitened": ESTIMATORS["whitened"]}, cp=2)["whitened"]
    (finding,) = audit(pair_of(result)).findings
    assert finding.code == "whitening-by-rank"
