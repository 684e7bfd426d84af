"""Are the rewards and advantages right? Both are recomputed from the rollout's rewards, as slime's code does it.

What slime computes is one question, whether that is what was meant is another: a baseline over the samples of several
prompts is a finding even where slime computed it as written.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from slime_instrument._analysis.pair import (
    GROUPED_ESTIMATORS,
    Baseline,
    ReadPair,
    executions,
    n_executions,
    prompt_groups,
    slimes_baseline,
)
from slime_instrument._dump.zigzag import owned
from slime_instrument._format.join import Pair
from slime_instrument._format.values import integers, log_probs, number, truth, whole_number

_CLOSE = 1e-4  # relative and absolute: slime computes in float32, and so do whitening and its sums
_STD_EPSILON = 1e-6  # slime's own, below the standard deviation of a group
_UNLIKELY = 1e-3  # expected number of chance duplicates from which on they are no news


@dataclass(frozen=True)
class AuditFinding:
    """Something that is wrong with rewards or advantages.

    Attributes:
        code: the kind.
        message: one sentence with its numbers.
        samples: rollout positions.
        numbers: what the sentence says, for programs.
    """

    code: str
    message: str
    samples: tuple[int, ...]
    numbers: Mapping[str, float | None] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "message": self.message,
            "samples": list(self.samples),
            "numbers": {name: _finite(value) for name, value in self.numbers.items()},
        }


@dataclass(frozen=True)
class BaselineGroup:
    """The samples that share a baseline.

    Attributes:
        samples: rollout positions.
        n_executions: how many executions they are of.
        mean, std: of their rewards; None where one has none (std: of a single sample too).
        prompts: how many prompts they are of, by ``group_index``; None where samples have none.
    """

    samples: tuple[int, ...]
    n_executions: int
    mean: float | None
    std: float | None
    prompts: int | None

    @property
    def without_variance(self) -> bool:
        """Whether all rewards are equal: the group teaches nothing."""
        return self.std == 0.0

    def as_dict(self) -> dict[str, Any]:
        names = ("n_executions", "mean", "std", "without_variance", "prompts")
        return {"samples": list(self.samples), **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class Audit:
    """Result of :func:`audit`.

    Attributes:
        rollout_id: which rollout.
        groups: the groups of the baseline; those of one prompt where the estimator has no baseline.
        findings: what is wrong.
        checked: fields that were recomputed and compared, such as ``rewards`` and ``advantages``.
        unchecked: field -> why it was not.
    """

    rollout_id: int | None
    groups: tuple[BaselineGroup, ...]
    findings: tuple[AuditFinding, ...]
    checked: tuple[str, ...]
    unchecked: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        flat = sum(group.without_variance for group in self.groups)
        return {
            "rollout_id": self.rollout_id,
            "groups": [group.as_dict() for group in self.groups],
            "groups_without_variance": {"n": flat, "share": flat / len(self.groups) if self.groups else None},
            "findings": [finding.as_dict() for finding in self.findings],
            "checked": list(self.checked),
            "unchecked": dict(self.unchecked),
        }


def audit(pair: ReadPair, arguments: Mapping[str, Any] | None = None) -> Audit:
    """Check one rollout.

    Args:
        pair: both sides.
        arguments: slime's, for dumps without provenance; they win over what provenance records.
    """
    return _Auditor(pair, {**pair.arguments, **(arguments or {})}).run()


class _Auditor:
    """One rollout with what is worked out about it on the way."""

    def __init__(self, pair: ReadPair, arguments: Mapping[str, Any]) -> None:
        self.pair, self.arguments = pair, arguments
        self.sources = pair.rollout.samples
        self.estimator = arguments.get("advantage_estimator")
        self.raw = [_reward(sample, arguments.get("reward_key")) for sample in self.sources]
        self.baseline = slimes_baseline(len(self.sources), arguments) if self._has_baseline else None
        self.findings: list[AuditFinding] = []
        self.checked: list[str] = []
        self.unchecked: dict[str, str] = {}
        self.misrewarded: set[int] = set()

    @property
    def _has_baseline(self) -> bool:
        return self.estimator in GROUPED_ESTIMATORS and bool(self.arguments.get("rewards_normalization", True))

    def run(self) -> Audit:
        self._rewards()
        self._baseline_over_prompts()
        self._siblings()
        self._recomputed()
        self._not_finite()
        self._signal()
        self._truncated()
        self._duplicates()
        groups = tuple(map(self._group, self.parts))
        return Audit(self.pair.rollout_id, groups, tuple(self.findings), tuple(self.checked), dict(self.unchecked))

    def _add(self, code: str, message: str, samples: Sequence[int], **numbers: float | None) -> None:
        if samples:
            self.findings.append(AuditFinding(code, message, tuple(sorted(set(samples))), numbers))

    @cached_property
    def parts(self) -> Sequence[Sequence[int]]:
        """Positions that share a baseline; those of one prompt where the estimator has none."""
        return self.baseline.groups if self.baseline is not None else prompt_groups(self.sources, self.arguments)

    def _known_rewards(self, part: Sequence[int]) -> list[float]:
        """The rewards of some samples; empty where one has none."""
        known = [reward for position in part if (reward := self.raw[position]) is not None]
        return known if len(known) == len(part) else []

    def _group(self, part: Sequence[int]) -> BaselineGroup:
        known = self._known_rewards(part)
        mean = std = None
        if known:
            mean = sum(known) / len(known)
        if len(known) > 1:  # of equal rewards the sum may differ from their multiple by a rounding
            std = _finite(float(torch.tensor(known, dtype=torch.float64).std())) if len(set(known)) > 1 else 0.0
        samples = [self.sources[position] for position in part]
        indices = [whole_number(sample.get("group_index")) for sample in samples]
        prompts = len(set(indices)) if None not in indices else None
        return BaselineGroup(tuple(part), n_executions(samples), mean, std, prompts)

    # --- rewards ---

    def _rewards(self) -> None:
        numbers = {one.position: number(one.train.get("rewards")) for one in self.pair.joined.pairs}
        stored = {position: value for position, value in numbers.items() if value is not None}
        if self.arguments.get("custom_reward_post_process_path"):
            self.unchecked["rewards"] = "the run has a reward post-processing function of its own"
        elif self.estimator is None:
            self.unchecked["rewards"] = "the train dump does not say which advantage estimator the run used"
        elif not stored:
            self.unchecked["rewards"] = "the train dump has no rewards"
        elif any(reward is None for reward in self.raw):
            self.unchecked["rewards"] = "a sample of the rollout has no number as its reward"
        elif self._has_baseline and self.baseline is None:
            self.unchecked["rewards"] = "the train dump does not say n_samples_per_prompt and rollout_batch_size"
        else:
            self.checked.append("rewards")
            expected = self._normalized(self.baseline)
            self.misrewarded = {at for at, value in stored.items() if not _close(value, expected[at])}
            if self.misrewarded:
                self._explain_rewards(stored, expected)

    def _normalized(self, baseline: Baseline | None) -> list[float]:
        """Every sample's reward as slime normalises it over these groups; raw without groups."""
        rewards = torch.tensor([math.nan if one is None else one for one in self.raw], dtype=torch.float32)
        by_std = self.estimator != "reinforce_plus_plus_baseline" and truth(
            self.arguments.get("grpo_std_normalization", True)
        )
        found = rewards.clone()
        for part in baseline.groups if baseline is not None else ():
            chosen = rewards[list(part)]
            centred = chosen - chosen.mean()
            if by_std:
                spread = centred.std() if len(part) > 1 else torch.tensor(math.nan)
                centred = centred / (spread + _STD_EPSILON)
            found[list(part)] = centred
        numbers: list[float] = found.tolist()
        return numbers

    def _explain_rewards(self, stored: Mapping[int, float], expected: Sequence[float]) -> None:
        differences = [abs(stored[at] - expected[at]) for at in self.misrewarded]
        off = max(filter(math.isfinite, differences), default=math.nan)
        for what, values in self._other_rewards():
            if all(_close(stored[at], values[at]) for at in stored):
                self._add(
                    "baseline-wrong-group",
                    f"{len(self.misrewarded)} rewards are those of a baseline over {what}",
                    sorted(self.misrewarded),
                    largest_difference=off,
                )
                return
        self._add(
            "reward-mismatch",
            f"{len(self.misrewarded)} of {len(stored)} rewards are not what slime makes of the rollout's; the largest "
            f"difference is {off:.4g}",
            sorted(self.misrewarded),
            largest_difference=off,
        )

    def _other_rewards(self) -> Iterator[tuple[str, list[float]]]:
        n = len(self.sources)
        per_prompt = whole_number(self.arguments.get("n_samples_per_prompt")) or 0
        choices: list[tuple[str, Baseline | None]] = [("the whole batch", Baseline((tuple(range(n)),), True))]
        if 1 < per_prompt < n and n % per_prompt == 0:
            strided = tuple(tuple(range(start, n, n // per_prompt)) for start in range(n // per_prompt))
            choices.append(("samples that stand apart by the number of prompts", Baseline(strided, False)))
            for shift in range(1, per_prompt):
                order = [(position + shift) % n for position in range(n)]
                moved = tuple(tuple(order[start : start + per_prompt]) for start in range(0, n, per_prompt))
                choices.append((f"groups that start {shift} samples late", Baseline(moved, False)))
        prompts = tuple(tuple(group) for group in prompt_groups(self.sources, self.arguments))
        choices.append(("the samples of each prompt", Baseline(prompts, False)))
        for what, baseline in choices:
            yield what, self._normalized(baseline)
        yield "no group at all (they are the raw ones)", self._normalized(None)

    def _baseline_over_prompts(self) -> None:
        if self.baseline is None:
            return
        for part in self.baseline.groups:
            indices = {whole_number(self.sources[position].get("group_index")) for position in part}
            if None in indices or len(indices) < 2:
                continue
            why = (
                f"the batch has {len(self.sources)} samples, not n_samples_per_prompt x rollout_batch_size = "
                f"{self.arguments['n_samples_per_prompt']} x {self.arguments['rollout_batch_size']}, and slime then "
                "takes all of them as one group"
                if self.baseline.whole_batch
                else "samples of one prompt do not stand together in the batch"
            )
            self._add(
                "baseline-wrong-group",
                f"one baseline for {len(part)} samples of {len(indices)} prompts: {why}",
                part,
                n_prompts=float(len(indices)),
            )

    def _siblings(self) -> None:
        """Executions that have several samples count several times: in the baseline, and in releases without sums of
        masks per execution in the loss."""
        ids = executions(self.sources)
        members: dict[object, list[int]] = defaultdict(list)
        for position, one in enumerate(ids):
            if one is not None:
                members[one].append(position)
        several = {one: at for one, at in members.items() if len(at) > 1}
        if not several or any(reward is None for reward in self.raw):
            return
        for part in self.baseline.groups if self.baseline is not None else ():
            inside = [at for at in several.values() if len(set(at) & set(part)) > 1]
            by_sample = _mean([self.raw[position] for position in part])
            each: dict[object, list[float | None]] = defaultdict(list)
            for position in part:
                each[ids[position] if ids[position] is not None else ("alone", position)].append(self.raw[position])
            by_execution = _mean([_mean(rewards) for rewards in each.values()])
            if inside and abs(by_sample - by_execution) > _CLOSE:
                touched = [position for at in inside for position in at if position in part]
                self._add(
                    "siblings-overweighted",
                    f"executions with several samples count once for each: the baseline of {len(part)} samples is "
                    f"{by_sample:.4g}; counting each execution once, it is {by_execution:.4g}",
                    touched,
                    baseline=by_sample,
                    baseline_by_execution=by_execution,
                )
        positions = {position for at in several.values() for position in at}
        trained = [one for one in self.pair.joined.pairs if one.position in positions]
        summed = any(name in one.train for one in trained for name in ("rollout_mask_sums", "group_mask_sums"))
        if trained and not summed and not truth(self.arguments.get("calculate_per_token_loss")):
            self._add(
                "siblings-overweighted",
                f"{len(several)} executions have several samples, and this release's loss takes the mean of each "
                "sample: an execution weighs as many times as it has samples",
                sorted(positions),
                n_executions=float(len(several)),
            )

    # --- advantages ---

    def _recomputed(self) -> None:
        worked = _Worked.of(self.pair, self.arguments)
        self.unchecked |= worked.unchecked
        for name in ("kl", "returns", "advantages"):
            values = worked.fields.get(name)
            if values is None or not any(_floats(one.train.get(name)) is not None for one in self.pair.joined.pairs):
                continue
            self.checked.append(name)
            older = worked.older.get(name)
            if older is not None and not self._differing(name, older):
                if name == "advantages":
                    self._add(
                        "whitening-by-rank",
                        "each context-parallel rank whitened its own tokens: the halves of one sequence were shifted "
                        "and scaled differently (slime's releases up to v0.3.1 do this)",
                        list(older),
                    )
                continue
            self._compare_field(name, values)

    def _differing(self, name: str, expected: Mapping[int, torch.Tensor]) -> list[tuple[Pair, torch.Tensor, float]]:
        """Samples whose field is another one: with the tokens that differ, and by how much they do."""
        found = []
        for one in self.pair.joined.pairs:
            stored, wanted = _floats(one.train.get(name)), expected.get(one.position)
            if stored is None or wanted is None or len(stored) != len(wanted):
                continue
            wrong = ~torch.isclose(stored, wanted, rtol=_CLOSE, atol=_CLOSE, equal_nan=True)
            if bool(wrong.any()):
                off = (stored - wanted)[wrong].abs().nan_to_num(nan=math.inf)
                found.append((one, wrong, float(off.max())))
        return found

    def _compare_field(self, name: str, expected: Mapping[int, torch.Tensor]) -> None:
        differing = self._differing(name, expected)
        largest = max((size for _, _, size in differing), default=0.0)
        counted = [bool((wrong & _mask(one, len(wrong))).any()) for one, wrong, _ in differing]
        off = [one.position for (one, _, _), inside in zip(differing, counted, strict=True) if inside]
        off_masked = [one.position for (one, _, _), inside in zip(differing, counted, strict=True) if not inside]
        kind = {"kl": "kl-mismatch", "returns": "return-mismatch", "advantages": "advantage-mismatch"}[name]
        self._add(
            kind,
            f"{name} of {len(off)} samples are not what {self.estimator} gives from the dump's own rewards, masks and "
            f"log-probs; the largest difference is {largest:.4g}",
            off,
            largest_difference=largest,
        )
        if name == "advantages":
            self._add(
                "advantage-at-masked",
                f"{len(off_masked)} samples have other advantages at tokens with loss mask 0 than {self.estimator} "
                "gives",
                off_masked,
                largest_difference=largest,
            )

    def _not_finite(self) -> None:
        alone: list[int] = []
        other: list[int] = []
        singles = {part[0] for part in self.parts if len(part) == 1}
        for one in self.pair.joined.pairs:
            values = _floats(one.train.get("advantages"))
            if values is None or bool(values[_mask(one, len(values))].isfinite().all()):
                continue
            (alone if one.position in singles else other).append(one.position)
        self._add(
            "singleton-group",
            f"advantages of {len(alone)} samples are NaN: each is alone in its group, and one reward has no standard "
            "deviation",
            alone,
        )
        self._add("non-finite-advantage", f"advantages of {len(other)} samples are NaN or infinite", other)

    def _signal(self) -> None:
        """Advantages that no reward explains, rewards that lead to no advantage, and rollouts that teach nothing."""
        sizes: dict[int, float] = {}
        for one in self.pair.joined.pairs:
            values = _floats(one.train.get("advantages"))
            counted = values[_mask(one, len(values))] if values is not None else None
            if counted is not None and len(counted) and bool(counted.isfinite().all()):
                sizes[one.position] = float(counted.abs().max())
        if sizes and all(size == 0 for size in sizes.values()):
            self._add(
                "no-signal", f"all {len(sizes)} trained samples have advantage 0: nothing is learned", sorted(sizes)
            )
            return
        shaped = self.arguments.get("kl_coef") or self.arguments.get("use_opd")
        if self.baseline is None or shaped or self.arguments.get("normalize_advantages"):
            return
        if self.arguments.get("custom_advantage_function_path") or "rewards" not in self.checked:
            return
        unearned: list[int] = []
        ignored: list[int] = []
        for part in self.baseline.groups:
            rewards = self._known_rewards(part)
            if len(rewards) < 2:
                continue
            # Equal rewards still differ from their float32 mean by a rounding, which the division blows up.
            rounding = 2.0**-23 * max(map(abs, rewards)) / _STD_EPSILON + _CLOSE
            mean = _mean(rewards)
            for position, reward in zip(part, rewards, strict=True):
                size = sizes.get(position)
                if size is None or position in self.misrewarded:
                    continue
                if len(set(rewards)) == 1 and size > rounding:
                    unearned.append(position)
                elif abs(reward - mean) > _CLOSE and size == 0:
                    ignored.append(position)
        self._add(
            "advantage-without-reward",
            f"{len(unearned)} samples have an advantage although all rewards of their group are equal",
            unearned,
        )
        self._add(
            "reward-without-advantage",
            f"{len(ignored)} samples have advantage 0 although their reward is not their group's mean",
            ignored,
        )

    # --- samples ---

    def _truncated(self) -> None:
        above: list[int] = []
        for part in self.parts:
            rewards = self._known_rewards(part)
            if len(rewards) < 2:
                continue
            highest = _mean(rewards) + _CLOSE
            for position, reward in zip(part, rewards, strict=True):
                sample = self.sources[position]
                cut = str(sample.get("status", "")).rpartition(".")[2].lower() == "truncated"
                if cut and reward > highest and not truth(sample.get("remove_sample")):
                    above.append(position)
        self._add(
            "truncated-rewarded",
            f"{len(above)} truncated samples have a reward above their group's mean: being cut off is reinforced",
            above,
        )

    def _duplicates(self) -> None:
        """The same answer twice, where chance does not give it: from its log-probs it follows how often it would."""
        same: dict[tuple[int, bytes], list[int]] = defaultdict(list)
        for position, sample in enumerate(self.sources):
            tokens = integers(sample.get("tokens"))
            length = whole_number(sample.get("response_length")) or 0
            if tokens is not None and length:
                same[(length, tokens.numpy().tobytes())].append(position)
        found: list[int] = []
        for positions in same.values():
            if len(positions) < 2:
                continue
            given = log_probs(self.sources[positions[0]].get("rollout_log_probs"))
            if given is None or not bool(given[0].isfinite().all()):
                continue
            by_chance = len(self.sources) * math.exp(min(0.0, float(given[0].double().sum())))
            if by_chance < _UNLIKELY:
                found += positions
        self._add(
            "duplicate-samples",
            f"{len(found)} samples are copies of others: the same prompt with the same answer, which by its log-probs "
            "would hardly be sampled twice",
            found,
        )


@dataclass(frozen=True)
class _Worked:
    """kl, returns and advantages, recomputed.

    Attributes:
        fields: field -> position -> values, float64, shape ``(response,)``.
        older: the same for fields that older releases of slime fill in another way.
        unchecked: field -> why it could not be worked out.
    """

    fields: Mapping[str, Mapping[int, torch.Tensor]]
    unchecked: Mapping[str, str]
    older: Mapping[str, Mapping[int, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, whole: ReadPair, arguments: Mapping[str, Any]) -> _Worked:
        pairs = whole.joined.pairs
        why = _why_not(pairs, arguments)
        if why is not None:
            return cls({}, {"advantages": why})
        estimator = str(arguments.get("advantage_estimator"))
        kl = _kls(pairs, arguments, whole)
        if kl is None:
            return cls({}, {"advantages": "the train dump lacks the log-probs that its KL is made of"})
        coefficient = number(arguments.get("kl_coef")) or 0.0
        gamma, lambd = number(arguments.get("gamma")), number(arguments.get("lambd"))
        returns: dict[int, torch.Tensor] = {}
        advantages: dict[int, torch.Tensor] = {}
        older: dict[str, Mapping[int, torch.Tensor]] = {}
        in_place: dict[int, torch.Tensor] = {}
        for one in pairs:
            reward = number(one.train.get("rewards"))
            mine = kl[one.position]
            mask = _mask(one, len(mine)).double()
            if reward is None:
                return cls({}, {"advantages": "the train dump has no rewards"})
            if estimator == "ppo":
                values = _floats(one.train.get("values"))
                if values is None or len(values) != len(mine) or gamma is None or lambd is None:
                    return cls({}, {"advantages": "the train dump lacks values, gamma or lambd"})
                tokens = -coefficient * mine
                tokens[_last_of_rank_0(one, whole)] += reward
                in_place[one.position] = tokens
                advantages[one.position] = _gae(tokens, values, gamma, lambd)
                returns[one.position] = advantages[one.position] + values
            elif estimator == "reinforce_plus_plus":
                if gamma is None:
                    return cls({}, {"advantages": "the train dump does not say gamma"})
                tokens = -coefficient * mine * mask
                if bool(mask.any()):
                    tokens[int(mask.nonzero()[-1])] += reward
                returns[one.position] = advantages[one.position] = _discounted(tokens, gamma)
            elif estimator == "reinforce_plus_plus_baseline":
                advantages[one.position] = returns[one.position] = reward - coefficient * mine
            else:
                returns[one.position] = advantages[one.position] = torch.full_like(mine, reward)
        if arguments.get("use_opd"):
            if not _distilled(pairs, arguments, advantages):
                return cls(
                    {"kl": kl, "returns": returns}, {"advantages": "the train dump lacks the teacher's log-probs"}
                )
            if estimator == "reinforce_plus_plus_baseline":
                returns = dict(advantages)
        if in_place:  # up to #2266 slime adds the rewards into the very tensors that it dumps as kl
            older["kl"] = in_place
        if arguments.get("normalize_advantages"):
            parallel = whole.provenance.context_parallel or 1
            if parallel > 1:
                older["advantages"] = _whitened(pairs, advantages, parallel)
            advantages = _whitened(pairs, advantages, 1)
        return cls({"kl": kl, "returns": returns, "advantages": advantages}, {}, older)


def _why_not(pairs: Sequence[Pair], arguments: Mapping[str, Any]) -> str | None:
    estimator = arguments.get("advantage_estimator")
    if estimator is None:
        return "the train dump does not say which advantage estimator the run used"
    if arguments.get("custom_advantage_function_path"):
        return "the run has an advantage function of its own"
    if arguments.get("compute_advantages_and_returns") is False:
        return "the run computes no advantages"
    if estimator not in (*GROUPED_ESTIMATORS, "ppo", "reinforce_plus_plus"):
        return f"what {estimator} computes is not known here"
    if not pairs or any(_floats(one.train.get("advantages")) is None for one in pairs):
        return "the train dump has no advantages"
    return None


def _kls(pairs: Sequence[Pair], arguments: Mapping[str, Any], whole: ReadPair) -> dict[int, torch.Tensor] | None:
    """KL of each token as the advantages see it: 0 without a coefficient, or without log-probs at that moment."""
    found: dict[int, torch.Tensor] = {}
    own = "rollout_log_probs" if arguments.get("use_rollout_logprobs") else "log_probs"
    later = own == "log_probs" and whole.provenance.fields.get("log_probs") == "captured"
    wanted = bool(arguments.get("kl_coef")) and not later
    for one in pairs:
        stored = _floats(one.train.get("advantages"))
        length = len(stored) if stored is not None else 0
        found[one.position] = torch.zeros(length, dtype=torch.float64)
        if wanted:
            mine, reference = _floats(one.train.get(own)), _floats(one.train.get("ref_log_probs"))
            if mine is None or reference is None or not len(mine) == len(reference) == length:
                return None
            found[one.position] = _approximate_kl(mine, reference, str(arguments.get("kl_loss_type", "k1")))
    return found


def _approximate_kl(mine: torch.Tensor, reference: torch.Tensor, kind: str) -> torch.Tensor:
    ratio = mine - reference
    estimates: dict[str, Callable[[], torch.Tensor]] = {
        "k1": lambda: ratio,
        "k2": lambda: ratio**2 / 2,
        "k3": lambda: (-ratio).exp() - 1 + ratio,
        "low_var_kl": lambda: ((-ratio).exp() - 1 + ratio).clamp(-10, 10),
    }
    return estimates[kind]() if kind in estimates else torch.full_like(ratio, math.nan)


def _last_of_rank_0(one: Pair, whole: ReadPair) -> int:
    """Where slime adds a sequence's reward under PPO: to the last token that context-parallel rank 0 holds."""
    total, response = whole_number(one.train.get("total_lengths")), whole_number(one.train.get("response_lengths"))
    parallel = whole.provenance.context_parallel or 1
    if parallel == 1 or total is None or response is None:
        return -1
    front, back = owned(total, response, parallel, 0)
    held = [*front, *back]
    return held[-1] if held else -1


def _gae(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float) -> torch.Tensor:
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    return _discounted(rewards + gamma * following - values, gamma * lambd)


def _discounted(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Sum of what follows, each further token weighted by ``factor`` once more."""
    found, running = [], 0.0
    for value in reversed(values.tolist()):
        running = value + factor * running
        found.append(running)
    return torch.tensor(found[::-1], dtype=torch.float64)


def _distilled(pairs: Sequence[Pair], arguments: Mapping[str, Any], advantages: dict[int, torch.Tensor]) -> bool:
    own = "rollout_log_probs" if arguments.get("use_rollout_logprobs") else "log_probs"
    coefficient = number(arguments.get("opd_kl_coef"))
    for one in pairs:
        student, teacher = _floats(one.train.get(own)), _floats(one.train.get("teacher_log_probs"))
        if student is None or teacher is None or coefficient is None or len(student) != len(teacher):
            return False
        advantages[one.position] = advantages[one.position] - coefficient * (student - teacher)
    return True


def _whitened(pairs: Sequence[Pair], advantages: Mapping[int, torch.Tensor], parallel: int) -> dict[int, torch.Tensor]:
    """Mean 0 and variance 1 over the tokens with mask 1; with ``parallel`` above 1 over those of each context-parallel
    rank alone."""
    found = {position: values.clone() for position, values in advantages.items()}
    for rank in range(parallel):
        places: dict[int, list[int]] = {}
        for one in pairs:
            total, n = whole_number(one.train.get("total_lengths")), len(advantages[one.position])
            front, back = owned(total if total is not None else n, n, parallel, rank)
            places[one.position] = [*front, *back]
        mine = torch.cat([advantages[one.position][places[one.position]] for one in pairs])
        mask = torch.cat([_mask(one, len(advantages[one.position]))[places[one.position]] for one in pairs])
        if not bool(mask.any()):
            continue
        counted = mine[mask]
        variance = (counted - counted.mean()).square().sum() / max(1, len(counted) - 1)
        scale = (variance + 1e-8).rsqrt()
        for one in pairs:
            at = places[one.position]
            found[one.position][at] = (advantages[one.position][at] - counted.mean()) * scale
    return found


def _reward(sample: Mapping[str, Any], key: Any) -> float | None:
    reward = sample.get("reward")
    return number(reward.get(key)) if isinstance(reward, Mapping) else number(reward)


def _floats(value: Any) -> torch.Tensor | None:
    """One number per token as float64; None for anything else."""
    if isinstance(value, torch.Tensor) and value.dim() == 1 and not value.is_complex():
        return value.detach().double()
    found = log_probs(value) if isinstance(value, (list, tuple)) else None
    return found[0].double() if found is not None else None


def _mask(one: Pair, length: int) -> torch.Tensor:
    mask = integers(one.train.get("loss_masks"))
    return mask != 0 if mask is not None and len(mask) == length else torch.ones(length, dtype=torch.bool)


def _close(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or math.isclose(one, other, rel_tol=_CLOSE, abs_tol=_CLOSE)


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else math.nan


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
