"""Each fault that an audit knows, planted in a rollout that is right."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_instrument._analysis.audit import Audit, audit
from slime_instrument._analysis.gradient import loss_gradient
from slime_instrument._analysis.pair import joined_pair
from slime_instrument._format.dumps import rollout_dump_of, train_dump_of

PROMPTS, EACH = 4, 4
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 0.5, 0.25, 0.0, 1.0]
ARGUMENTS: dict[str, Any] = {
    "advantage_estimator": "grpo",
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "normalize_advantages": False,
    "n_samples_per_prompt": EACH,
    "rollout_batch_size": PROMPTS,
    "global_batch_size": PROMPTS * EACH,
    "kl_coef": 0.0,
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
    "loss_type": "policy_loss",
}


class Run:
    """A rollout and its training as plain payloads, for faults to be put into."""

    def __init__(self, rewards: list[float] = REWARDS, arguments: dict[str, Any] | None = None) -> None:
        random = torch.Generator().manual_seed(3)
        self.arguments = {**ARGUMENTS, **(arguments or {})}
        self.rollout: list[dict[str, Any]] = []
        self.train: list[dict[str, Any]] = []
        normalized = grpo(rewards, EACH)
        for position, reward in enumerate(rewards):
            response = 5 + position % 3
            tokens = torch.randint(0, 50, (3 + response,), generator=random)
            log_prob = -torch.rand(response, generator=random) * 2 - 0.5
            mask = [1] * (response - 1) + [position % 2]
            self.rollout.append(
                {
                    "index": position,
                    "group_index": position // EACH,
                    "rollout_id": position,
                    "tokens": tokens.tolist(),
                    "response_length": response,
                    "reward": reward,
                    "status": "completed",
                    "loss_mask": mask,
                    "rollout_log_probs": log_prob.tolist(),
                }
            )
            self.train.append(
                {
                    "data_parallel_rank": 0,
                    "rollout_position": position,
                    "sample_index": position,
                    "tokens": tokens,
                    "total_lengths": len(tokens),
                    "response_lengths": response,
                    "loss_masks": torch.tensor(mask, dtype=torch.int32),
                    "rewards": normalized[position],
                    "rollout_mask_sums": float(sum(mask)),
                    "rollout_log_probs": log_prob,
                    "log_probs": log_prob + 0.01,
                    "advantages": torch.full((response,), normalized[position]),
                    "returns": torch.full((response,), normalized[position]),
                    "kl": torch.zeros(response),
                }
            )

    def set_rewards(self, rewards: list[float]) -> None:
        """Put these normalised rewards into training, with the advantages that follow."""
        for sample, reward in zip(self.train, rewards, strict=True):
            sample["rewards"] = reward
            for name in ("advantages", "returns"):
                sample[name] = torch.full_like(sample[name], reward)

    def pair(self) -> Any:
        shard = {
            "rank": 0,
            "data_parallel_rank": 0,
            "sample_indices": [one["sample_index"] for one in self.train],
            "partition": [one["rollout_position"] for one in self.train],
            "micro_batch_indices": [[n] for n in range(len(self.train))],
            "num_microbatches": [len(self.train)],
            "global_batch_sizes": [len(self.train)],
            "provenance": {"arguments": self.arguments, "fields": {"log_probs": "recomputed"}},
        }
        payload = {"format_version": 2, "rollout_id": 5, "rank": 0, "samples": self.train, "dp_shards": [shard]}
        return joined_pair(
            rollout_dump_of(Path("rollout_data/5.pt"), {"rollout_id": 5, "samples": self.rollout}),
            train_dump_of(Path("train_data/5.pt"), payload),
        )

    def audit(self) -> Audit:
        return audit(self.pair())


def grpo(rewards: list[float], each: int) -> list[float]:
    values = torch.tensor(rewards).reshape(-1, each)
    centred = values - values.mean(dim=-1, keepdim=True)
    return [float(one) for one in (centred / (centred.std(dim=-1, keepdim=True) + 1e-6)).flatten()]


def test_a_rollout_that_is_right_has_no_findings() -> None:
    result = Run().audit()
    assert result.findings == ()
    assert result.checked == ("rewards", "kl", "returns", "advantages")
    assert [group.samples for group in result.groups] == [tuple(range(n, n + EACH)) for n in range(0, 16, EACH)]
    assert result.as_dict()["groups_without_variance"] == {"n": 0, "share": 0.0}


def whole_batch(run: Run) -> None:
    run.set_rewards(grpo(REWARDS, len(REWARDS)))


def late_by_one(run: Run) -> None:
    moved = grpo([*REWARDS[1:], REWARDS[0]], EACH)
    run.set_rewards([moved[-1], *moved[:-1]])


def one_prompt_too_few(run: Run) -> None:
    run.arguments["rollout_batch_size"] = PROMPTS - 1
    run.set_rewards(grpo(REWARDS, len(REWARDS)))


def other_reward(run: Run) -> None:
    run.train[6]["rewards"] += 0.5
    run.train[6]["advantages"] = run.train[6]["advantages"] + 0.5
    run.train[6]["returns"] = run.train[6]["returns"] + 0.5


def other_advantage(run: Run) -> None:
    run.train[6]["advantages"][2] += 0.5


def at_a_masked_token(run: Run) -> None:
    run.train[6]["advantages"][-1] = 9.0


def other_return(run: Run) -> None:
    run.train[6]["returns"][1] = 9.0


def other_kl(run: Run) -> None:
    run.train[6]["kl"][1] = 9.0


def not_finite(run: Run) -> None:
    run.train[6]["advantages"][1] = math.nan


def truncated(run: Run) -> None:
    run.rollout[0]["status"] = "truncated"


def copied(run: Run) -> None:
    run.rollout[6]["rollout_log_probs"] = [-4.0] * run.rollout[6]["response_length"]
    for name in ("tokens", "response_length", "rollout_log_probs"):
        run.rollout[9][name] = copy.deepcopy(run.rollout[6][name])
    for name in ("tokens", "total_lengths", "response_lengths"):
        run.train[9][name] = run.train[6][name]


def siblings(run: Run) -> None:
    run.rollout[1]["rollout_id"] = run.rollout[2]["rollout_id"] = 0
    for sample in run.train:
        del sample["rollout_mask_sums"]


PLANTED: dict[str, tuple[Callable[[Run], None], str, set[int]]] = {
    "a baseline over the whole batch": (whole_batch, "baseline-wrong-group", set(range(16))),
    "groups that start one sample late": (late_by_one, "baseline-wrong-group", {0, 1, 2, 3}),
    "a batch size that makes slime take one group": (one_prompt_too_few, "baseline-wrong-group", set(range(16))),
    "one reward that is another": (other_reward, "reward-mismatch", {6}),
    "one advantage that is another": (other_advantage, "advantage-mismatch", {6}),
    "an advantage at a masked token": (at_a_masked_token, "advantage-at-masked", {6}),
    "one return that is another": (other_return, "return-mismatch", {6}),
    "one KL that is another": (other_kl, "kl-mismatch", {6}),
    "an advantage that is NaN": (not_finite, "non-finite-advantage", {6}),
    "a truncated sample with the better reward": (truncated, "truncated-rewarded", {0}),
    "a sample twice": (copied, "duplicate-samples", {6, 9}),
    "an execution with three samples": (siblings, "siblings-overweighted", {0, 1, 2}),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found_with_its_samples(fault: str) -> None:
    plant, code, samples = PLANTED[fault]
    run = Run()
    plant(run)
    found = {one.code: set(one.samples) for one in run.audit().findings}
    assert code in found
    assert samples <= found[code]


def test_a_sample_alone_in_its_group_has_no_advantage() -> None:
    run = Run(arguments={"n_samples_per_prompt": 1, "rollout_batch_size": 16})
    for position, sample in enumerate(run.rollout):
        sample["group_index"] = position
    run.set_rewards([math.nan] * 16)
    assert [one.code for one in run.audit().findings] == ["singleton-group"]


def test_rewards_that_are_all_equal_teach_nothing() -> None:
    run = Run([1.0] * 16)
    result = run.audit()
    assert [one.code for one in result.findings] == ["no-signal"]
    assert result.as_dict()["groups_without_variance"] == {"n": 4, "share": 1.0}


def test_an_advantage_that_no_reward_earned_and_a_reward_that_earned_none() -> None:
    run = Run([1.0] * 4 + REWARDS[4:])
    run.train[1]["advantages"] = torch.full_like(run.train[1]["advantages"], 0.7)
    run.train[7]["advantages"] = torch.zeros_like(run.train[7]["advantages"])
    found = {one.code: one.samples for one in run.audit().findings}
    assert found["advantage-without-reward"] == (1,)
    assert found["reward-without-advantage"] == (7,)


def test_a_short_answer_given_twice_is_no_copy() -> None:
    run = Run()
    copied(run)
    for position in (6, 9):
        run.rollout[position]["rollout_log_probs"] = [-0.01] * run.rollout[position]["response_length"]
    assert "duplicate-samples" not in {one.code for one in run.audit().findings}


def test_what_the_dump_does_not_record_is_said_and_may_be_given() -> None:
    run = Run()
    whole_batch(run)
    recorded, run.arguments = run.arguments, {}
    assert "rewards" in run.audit().unchecked
    assert not run.audit().checked
    assert [one.code for one in audit(run.pair(), recorded).findings] == ["baseline-wrong-group"]


@pytest.mark.parametrize(
    ("name", "field"),
    [("custom_reward_post_process_path", "rewards"), ("custom_advantage_function_path", "advantages")],
)
def test_what_a_function_of_the_users_makes_is_not_judged(name: str, field: str) -> None:
    run = Run(arguments={name: "mine.function"})
    result = run.audit()
    assert field in result.unchecked
    assert field not in result.checked


def test_the_sample_that_moved_the_model_comes_first() -> None:
    run = Run()
    run.train[11]["advantages"] = run.train[11]["advantages"] * 40
    gradient = loss_gradient(run.pair())
    assert gradient.unknown == {}
    assert gradient.shares[0].position == 11
    assert gradient.shares[0].share > 0.6
    assert gradient.shares[0].times_ordinary == pytest.approx(16 * gradient.shares[0].share)
    assert gradient.as_dict()["samples"][0]["position"] == 11


def test_samples_whose_loss_the_dump_does_not_hold_are_named_with_the_reason() -> None:
    run = Run()
    del run.train[3]["advantages"]
    gradient = loss_gradient(run.pair())
    assert list(gradient.unknown.values()) == [(3,)]
    assert 3 not in gradient.tokens
    run.arguments["loss_type"] = "sft_loss"
    assert list(loss_gradient(run.pair()).unknown.values()) == [tuple(range(16))]
