"""A v2 dump against the rollout dump that it was trained from."""

from __future__ import annotations

import math
from typing import Any

import torch

from slime_instrument._format.join import locate
from slime_instrument._format.values import (
    as_ints,
    brief,
    differs_beyond_rounding,
    equal_values,
    integers,
    log_probs,
    number,
    plain_value,
    truth,
    unpredicted_first_token,
    whole_number,
)
from slime_instrument._validate.problems import Problems, V2Dump

# Rewards pass through float32 on some ways to the trainer.
_REWARD_TOLERANCE = 1e-6


def check_against_rollout(dump: V2Dump, found: Problems) -> None:
    """Same rollout, same tokens at the same position, same reward.

    ``raw_reward`` is compared; ``rewards`` is normalised on the way and never is.
    """
    rollout = dump.rollout
    if rollout is None:
        return
    if rollout.kind == "rollout-eval":
        message = f"{rollout.path} is an evaluation's dump, which no training belongs to"
        found.error("wrong-rollout", message, field="rollout_id")
        return
    own = whole_number(dump.payload.get("rollout_id"))
    if own is not None and rollout.rollout_id is not None and own != rollout.rollout_id:
        message = f"rollout_id is {own}, but {rollout.path} is of rollout {rollout.rollout_id}"
        found.error("wrong-rollout", message, field="rollout_id")
        return
    n = len(rollout.samples)
    raw_reward = dump.raw_reward
    if raw_reward is not None and len(raw_reward) != n:
        message = f"raw_reward has {len(raw_reward)} entries, but the rollout dump {n} samples"
        found.warning("batch-size", message, field="raw_reward")
    located = locate([sample for _, sample in dump.samples], rollout.samples)
    for (i, sample), (position, trouble) in zip(dump.samples, located, strict=True):
        if trouble in ("not-in-rollout", "ambiguous"):
            _say_not_located(dump, i, sample, trouble, found)
            continue
        if position is None:
            continue
        source = rollout.samples[position]
        _compare_tokens(i, sample, position, source, found)
        _compare_mask(i, sample, position, source, found)
        _compare_log_probs(i, sample, position, source, found)
        if raw_reward is not None and position < len(raw_reward):
            _compare_reward(i, raw_reward[position], source, found)


def _say_not_located(dump: V2Dump, i: int, sample: dict[str, Any], trouble: str, found: Problems) -> None:
    assert dump.rollout is not None
    position, index = whole_number(sample.get("rollout_position")), whole_number(sample.get("sample_index"))
    if position is not None:
        if dump.raw_reward is None:
            return  # the coverage check took its number of samples from the rollout dump, and has said it
        n = len(dump.rollout.samples)
        message = f"sample {i}: rollout_position is {position}, but the rollout dump has {n} samples"
        found.error("extra-position", message, sample=i, field="rollout_position")
    elif trouble == "ambiguous":
        message = f"sample {i}: without rollout_position, sample_index {index} does not name one rollout sample"
        found.warning("ambiguous", message, sample=i, field="sample_index")
    else:
        message = f"sample {i}: sample_index {index} is not in the rollout dump"
        found.error("extra-position", message, sample=i, field="sample_index")


def check_local_reward(dump: V2Dump, found: Problems) -> None:
    """``local_raw_reward`` of a sample is the entry of ``raw_reward`` at its position."""
    raw_reward = dump.raw_reward
    for (i, sample), position in zip(dump.samples, dump.positions, strict=True):
        own = sample.get("local_raw_reward")
        if own is None or raw_reward is None or position is None or not 0 <= position < len(raw_reward):
            continue
        if not _same(own, raw_reward[position]):
            message = (
                f"sample {i}: local_raw_reward is {brief(own)}, but raw_reward[{position}] is "
                f"{brief(raw_reward[position])}"
            )
            found.error("reward-mismatch", message, sample=i, field="local_raw_reward")


def _compare_tokens(i: int, sample: dict[str, Any], position: int, source: dict[str, Any], found: Problems) -> None:
    own, other = as_ints(sample.get("tokens")), as_ints(source.get("tokens"))
    if own is not None and other is not None and own != other:
        if len(own) != len(other):
            message = f"sample {i}: {len(own)} tokens, but rollout sample {position} has {len(other)}"
        else:
            k = next(k for k in range(len(own)) if own[k] != other[k])
            message = f"sample {i}: token {k} is {own[k]}, but {other[k]} in rollout sample {position}"
        found.error("tokens-differ", message, sample=i, field="tokens")
    mine, theirs = whole_number(sample.get("response_lengths")), whole_number(source.get("response_length"))
    if mine is not None and theirs is not None and mine != theirs:
        message = f"sample {i}: response_lengths is {mine}, but rollout sample {position} has {theirs}"
        found.error("length", message, sample=i, field="response_lengths")


def _compare_mask(i: int, sample: dict[str, Any], position: int, source: dict[str, Any], found: Problems) -> None:
    """slime trains on the rollout's mask: on everything where that is None, on nothing with remove_sample."""
    own = integers(sample.get("loss_masks"))
    if own is None or "loss_mask" not in source:
        return
    stated = source["loss_mask"]
    expected = torch.ones_like(own) if stated is None else integers(stated)
    if expected is None or len(expected) != len(own):
        return  # the length is said elsewhere
    if truth(source.get("remove_sample")):
        expected = torch.zeros_like(own)
    wrong = ((own != 0) != (expected != 0)).nonzero().flatten()
    if len(wrong):
        k = int(wrong[0])
        message = (
            f"sample {i}: loss_masks is not the loss_mask of rollout sample {position} at {len(wrong)} of {len(own)} "
            f"tokens, first at {k}: {int(own[k])} here, {int(expected[k])} expected"
        )
        found.error("mask-mismatch", message, sample=i, field="loss_masks")


def _compare_log_probs(i: int, sample: dict[str, Any], position: int, source: dict[str, Any], found: Problems) -> None:
    """What training received as rollout_log_probs is what the rollout dumped, at the tokens that are trained."""
    name = "rollout_log_probs"
    own, theirs, mask = log_probs(sample.get(name)), log_probs(source.get(name)), integers(sample.get("loss_masks"))
    if own is None or theirs is None or len(own[0]) != len(theirs[0]):
        return
    wrong = differs_beyond_rounding(own[0], theirs[0], sample[name])
    if mask is not None and len(mask) == len(wrong):
        wrong &= mask != 0
    if len(wrong) and unpredicted_first_token(sample) and own[0][0].isnan():
        wrong[0] = False  # no context-parallel rank owns it, so that no rank could hand it in
    where = wrong.nonzero().flatten()
    if len(where):
        k = int(where[0])
        message = (
            f"sample {i}: {name} is not that of rollout sample {position} at {len(where)} trained tokens, first at "
            f"{k}: {float(own[0][k]):.6g} here, {float(theirs[0][k]):.6g} there"
        )
        found.error("rollout-log-probs-differ", message, sample=i, field=name)


def _compare_reward(i: int, reward: Any, source: dict[str, Any], found: Problems) -> None:
    metadata = source.get("metadata")
    # slime takes a raw_reward in the metadata before the reward itself.
    stated = metadata.get("raw_reward") if isinstance(metadata, dict) else None
    expected = stated if stated is not None else source.get("reward")
    if expected is None or reward is None:
        return
    # A dict holds several rewards, one of which training was told to use; which one, the files do not say.
    candidates = list(expected.values()) if isinstance(expected, dict) else [expected]
    if not any(_same(reward, candidate) for candidate in candidates):
        message = f"sample {i}: raw_reward is {brief(reward)}, but the rollout's reward is {brief(expected)}"
        found.error("reward-mismatch", message, sample=i, field="raw_reward")


def _same(one: Any, other: Any) -> bool:
    a, b = (number(value) if number(value) is not None else number(plain_value(value)) for value in (one, other))
    if a is None or b is None:
        return equal_values(one, other)
    return math.isclose(a, b, rel_tol=_REWARD_TOLERANCE, abs_tol=1e-12) or (math.isnan(a) and math.isnan(b))
