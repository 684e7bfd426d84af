"""Is each sample right by itself: parts of the right type, of the length that the sample says? The checks of one sample
serve train and rollout samples alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from slime_instrument._format.dumps import RankData, RolloutDump
from slime_instrument._format.references import TensorReference, references_in
from slime_instrument._format.schema import (
    CONTEXT_PARALLEL_FIELDS,
    FORGOTTEN_CONTEXT_PARALLEL_FIELDS,
    FORMAT_VERSION,
    LAYOUT_FIELDS,
    REQUIRED_SAMPLE_FIELDS,
    SAMPLER_HEAD_FIELDS,
)
from slime_instrument._format.unpickling import was_list
from slime_instrument._format.values import (
    HIGHEST_LOG_PROB,
    as_ints,
    as_list,
    brief,
    holds_whole_numbers,
    is_whole_number,
    length_of,
    log_probs,
    nan_indices,
    whole_number,
)
from slime_instrument._validate.batch import check_rank_schedule
from slime_instrument._validate.problems import Problems, V2Dump


def check_top_level(dump: V2Dump, found: Problems) -> None:
    """Keys of the file and their types; samples and shards are lists of dicts."""
    payload = dump.payload
    version = payload.get("format_version")
    if whole_number(version) != FORMAT_VERSION:
        found.error(
            "structure", f"format_version is {brief(version)}, expected {FORMAT_VERSION}", field="format_version"
        )
    for key in ("rollout_id", "rank"):
        if not is_whole_number(payload.get(key)):
            found.error("structure", f"{key} is {_describe(payload, key)}, expected a whole number", field=key)
    for key in ("samples", "dp_shards"):
        items = payload.get(key)
        if not isinstance(items, list):
            found.error("structure", f"{key} is {_describe(payload, key)}, expected a list of dicts", field=key)
            continue
        for i, item in enumerate(items):
            if not isinstance(item, dict):
                found.error(
                    "structure",
                    f"{key}[{i}] is a {type(item).__name__}, expected a dict",
                    sample=i if key == "samples" else None,
                    field=key,
                )
    if isinstance(payload.get("dp_shards"), list) and not payload["dp_shards"]:
        found.error("structure", "dp_shards is empty, expected one entry per data-parallel rank", field="dp_shards")
    if "raw_reward" in payload and payload["raw_reward"] is not None and dump.raw_reward is None:
        found.error("type", f"raw_reward is {_describe(payload, 'raw_reward')}, expected a list", field="raw_reward")


def check_sample_types(dump: V2Dump, found: Problems) -> None:
    """Required fields of each sample, and the types of those whose type is fixed."""
    response_fields = dump.response_fields()
    for i, sample in dump.samples:
        for name in REQUIRED_SAMPLE_FIELDS:
            if sample.get(name) is None:
                found.error("missing-field", f"sample {i} has no {name}", sample=i, field=name)
        for name in ("response_lengths", "total_lengths", "data_parallel_rank"):
            value = sample.get(name)
            if value is not None and (not is_whole_number(value) or int(value) < 0):
                message = f"sample {i}: {name} is {_describe(sample, name)}, expected a whole number of at least 0"
                found.error("type", message, sample=i, field=name)
        for name in ("rollout_position", "sample_index"):
            value = sample.get(name)
            if value is not None and not is_whole_number(value):
                message = f"sample {i}: {name} is {_describe(sample, name)}, expected a whole number"
                found.error("type", message, sample=i, field=name)
        tokens = sample.get("tokens")
        if tokens is not None and not holds_whole_numbers(tokens):
            message = f"sample {i}: tokens is {_describe(sample, 'tokens')}, expected one whole number per token"
            found.error("type", message, sample=i, field="tokens")
        for name in response_fields:
            value = sample.get(name)
            if value is not None and not _is_numbers(value) and not _may_be_wide(name, value):
                message = f"sample {i}: {name} is {_describe(sample, name)}, expected one number per response token"
                found.error("type", message, sample=i, field=name)


def check_field_coverage(dump: V2Dump, found: Problems) -> None:
    """A field that some samples have and others lack, so that nobody can tell absent from lost.

    A value of None counts as there: a text sample beside images has ``multimodal_train_inputs`` None.
    """
    response_fields = dump.response_fields()
    names = dict.fromkeys(name for _, sample in dump.samples for name in sample)
    for name in names:
        if name in REQUIRED_SAMPLE_FIELDS:
            continue
        without = [i for i, sample in dump.samples if name not in sample]
        if not without:
            continue
        have = len(dump.samples) - len(without)
        message = f"{name} is in {have} of {len(dump.samples)} samples; first without it: sample {without[0]}"
        report = found.error if name in response_fields else found.warning
        report("uneven-field", message, sample=without[0], field=name)


def _is_numbers(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return was_list(value) or (value.dim() >= 1 and value.is_floating_point())
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in value)
    return False


def _may_be_wide(name: str, value: Any) -> bool:
    """Whether ``value`` may have whole numbers, or several values for each token, as the sampler's top k has."""
    return name not in CONTEXT_PARALLEL_FIELDS and isinstance(value, torch.Tensor) and value.dim() >= 1


def _describe(holder: dict[str, Any], key: str) -> str:
    if key not in holder:
        return "missing"
    value = holder[key]
    if isinstance(value, torch.Tensor) and not was_list(value):
        return f"a tensor of {str(value.dtype).removeprefix('torch.')} with shape {tuple(value.shape)}"
    if isinstance(value, (int, float, bool, type(None))):
        return brief(value)
    if isinstance(value, str):
        return f"the string {value[:40]!r}"
    return f"a {'list' if was_list(value) else type(value).__name__}"


def check_lengths(dump: V2Dump, found: Problems) -> None:
    """Tokens against total_lengths, response-level fields and the mask against response_lengths."""
    forgotten = () if dump.provenance else FORGOTTEN_CONTEXT_PARALLEL_FIELDS
    fields = [name for name in dump.response_fields() if name not in forgotten]
    for i, sample in dump.samples:
        response, total = whole_number(sample.get("response_lengths")), whole_number(sample.get("total_lengths"))
        tokens = length_of(sample.get("tokens"))
        if total is not None and tokens is not None and tokens != total:
            message = f"sample {i}: tokens has {tokens} entries, but total_lengths is {total}"
            found.error("length", message, sample=i, field="tokens")
        total = total if total is not None else tokens
        response_lengths_of(i, sample, response, total, ["loss_masks", *fields], found)
        log_prob_fields = [name for name in fields if name.endswith("log_probs")]
        one_each = [name for name in log_prob_fields if name not in SAMPLER_HEAD_FIELDS]
        check_log_probs(i, sample, one_each, found)
        check_ragged(i, sample, response, found)
        check_routed_experts(i, sample, tokens if tokens is not None else total, found)
        for name in forgotten:
            length = length_of(sample.get(name))
            if length is not None and response is not None and length != response:
                message = (
                    f"sample {i}: {name} has {length} values for {response} response tokens: slime's native dump "
                    "does not restore this field, so it holds one context-parallel rank's part"
                )
                found.warning("unrestored-shard", message, sample=i, field=name)


def response_lengths_of(
    i: int, sample: dict[str, Any], response: int | None, total: int | None, fields: Iterable[str], found: Problems
) -> None:
    """One sample: the response fits into the tokens, and each of ``fields`` has one value per response token."""
    if response is None:
        return
    if total is not None and response > total:
        message = f"sample {i}: the response has {response} tokens, but the whole sample has {total}"
        found.error("length", message, sample=i, field="response_lengths")
    for name in fields:
        length = length_of(sample.get(name))
        if length is not None and length != response:
            message = (
                f"sample {i}: {name} has {length} values, but the response has {response} tokens of {total} in all"
            )
            found.error("length", message, sample=i, field=name)


def check_log_probs(i: int, sample: dict[str, Any], fields: Iterable[str], found: Problems) -> None:
    """No log-prob is above 0. Rounding of bf16 logits can lift one a little; more is another quantity, or a filler."""
    for name in fields:
        converted = log_probs(sample.get(name))
        if converted is None:
            if sample.get(name) is not None and length_of(sample[name]):
                message = f"sample {i}: {name} is {_describe(sample, name)}, expected one number per response token"
                found.error("type", message, sample=i, field=name)
            continue
        above = (converted[0] > HIGHEST_LOG_PROB).nonzero().flatten()
        if len(above):
            k = int(above[0])
            message = (
                f"sample {i}: {name} is above 0 at {len(above)} tokens, first at {k}: {float(converted[0][k]):.6g}; "
                "no probability has such a log-prob"
            )
            found.error("positive-log-prob", message, sample=i, field=name)


def check_ragged(i: int, sample: dict[str, Any], response: int | None, found: Problems) -> None:
    """Top-p token ids: offsets has response + 1 entries, starts with 0, never falls, ends with the number of ids."""
    ids, offsets = sample.get("rollout_top_p_token_ids"), sample.get("rollout_top_p_token_offsets")
    name = "rollout_top_p_token_offsets"
    if ids is None and offsets is None:
        return
    n_ids, values = length_of(ids), as_ints(offsets)
    if n_ids is None or values is None:
        message = f"sample {i}: rollout_top_p_token_ids and {name} belong together; one of them is missing or no list"
        found.error("top-p-offsets", message, sample=i, field=name)
        return
    if response is not None and len(values) != response + 1:
        message = f"sample {i}: {name} has {len(values)} entries, expected {response} response tokens + 1"
        found.error("top-p-offsets", message, sample=i, field=name)
    if values and values[0] != 0:
        found.error("top-p-offsets", f"sample {i}: {name} starts with {values[0]}, expected 0", sample=i, field=name)
    if any(after < before for before, after in itertools.pairwise(values)):
        found.error("top-p-offsets", f"sample {i}: {name} falls somewhere", sample=i, field=name)
    if values and values[-1] != n_ids:
        message = f"sample {i}: {name} ends in {values[-1]}, but there are {n_ids} ids"
        found.error("top-p-offsets", message, sample=i, field=name)


def check_routed_experts(i: int, sample: dict[str, Any], tokens: int | None, found: Problems) -> None:
    """Routed experts have shape (tokens - 1, layers, top-k): the last token is never put through the model.

    Only the shape is looked at; the values stay in the file. The field may be absent.
    """
    name = "rollout_routed_experts"
    value = sample.get(name)
    if value is None or tokens is None:
        return
    rows = length_of(value)
    if rows != max(tokens - 1, 0):
        message = f"sample {i}: {name} has {rows} rows, expected {tokens} tokens - 1 = {max(tokens - 1, 0)}"
        found.error("routed-experts", message, sample=i, field=name)
    if isinstance(value, (torch.Tensor, TensorReference)) and len(value.shape) != 3:
        message = f"sample {i}: {name} has shape {tuple(value.shape)}, expected (tokens - 1, layers, top-k)"
        found.error("routed-experts", message, sample=i, field=name)


def check_references(dump: V2Dump | RolloutDump, found: Problems) -> None:
    """Tensors in files of their own, of which the file is gone. The dump itself is as it was written."""
    samples = dump.samples if isinstance(dump, RolloutDump) else [sample for _, sample in dump.samples]
    gone: dict[str, list[str]] = {}
    for name, reference in references_in(samples):
        if reference.file is None:
            gone.setdefault(str(name), []).append(reference.path)
    for name, paths in gone.items():
        message = f"{name} of {len(paths)} samples is in files that are gone; the first: {paths[0]}"
        found.warning("missing-file", message, field=name)


def check_unowned_tokens(dump: V2Dump, found: Problems) -> None:
    """NaN in a response-level field.

    The first token of a sample without a prompt has no log-prob, and no context-parallel rank holds it: NaN there is
    how the file says so. Anywhere else it came out of training, which is worth knowing, and no fault of the dump.
    """
    for i, sample in dump.samples:
        response, total = whole_number(sample.get("response_lengths")), whole_number(sample.get("total_lengths"))
        for name in dump.response_fields():
            where = nan_indices(sample.get(name))
            if response is not None and response == total and where[:1] == [0]:
                where = where[1:]
            if where:
                message = f"sample {i}: {name} is NaN at {len(where)} response tokens, the first at index {where[0]}"
                found.warning("nan", message, sample=i, field=name)


def check_rank_file(rank: RankData, found: Problems) -> None:
    """Columns of one rank. Response-level values are parts of responses here, so they may only be too long."""
    data, n = rank.rollout_data, rank.n_samples
    for name in ("tokens", "response_lengths", "total_lengths", "loss_masks"):
        length = length_of(data.get(name))
        if length is None:
            found.error("missing-field", f"rollout_data has no list {name}", field=name)
        elif length != n:
            found.error("length", f"{name} has {length} entries, but the rank has {n} samples", field=name)
    for i in range(n):
        sample = rank.sample(i)
        response, total = whole_number(sample.get("response_lengths")), whole_number(sample.get("total_lengths"))
        tokens = length_of(sample.get("tokens"))
        if tokens is not None and total is not None and tokens != total:
            message = f"sample {i}: tokens has {tokens} entries, but total_lengths is {total}"
            found.error("length", message, sample=i, field="tokens")
        mask = length_of(sample.get("loss_masks"))
        if mask is not None and response is not None and mask != response:
            message = (
                f"sample {i}: loss_masks has {mask} values, but the response has {response} tokens of {total} in all"
            )
            found.error("length", message, sample=i, field="loss_masks")
        for name in CONTEXT_PARALLEL_FIELDS:
            length = length_of(sample.get(name))
            # Up to v0.2.1 the teacher's log-probs are those of the whole sample.
            limit = total if name == "teacher_log_probs" else response
            if length is not None and limit is not None and length > limit:
                message = (
                    f"sample {i}: {name} has {length} values, but the response has {response} tokens of {total} in all"
                )
                found.error("length", message, sample=i, field=name)
        check_ragged(i, sample, response, found)
        check_routed_experts(i, sample, tokens, found)
    check_rank_schedule("rollout_data", n, {name: as_list(data.get(name)) for name in LAYOUT_FIELDS}, found)


def check_rollout_dump(dump: RolloutDump, found: Problems) -> None:
    """Structure and lengths of a rollout dump's samples."""
    for i, sample in enumerate(dump.samples):
        tokens = length_of(sample.get("tokens"))
        response = whole_number(sample.get("response_length"))
        if tokens is None or not holds_whole_numbers(sample["tokens"]):
            found.error("type", f"sample {i}: tokens is no list of whole numbers", sample=i, field="tokens")
        if response is None or response < 0:
            message = f"sample {i}: response_length is {brief(sample.get('response_length'))}, expected a whole number"
            found.error("type", message, sample=i, field="response_length")
            continue
        response_lengths_of(i, sample, response, tokens, ("rollout_log_probs", "loss_mask"), found)
        check_log_probs(i, sample, ("rollout_log_probs",), found)
        check_ragged(i, sample, response, found)
        check_routed_experts(i, sample, tokens, found)
    check_references(dump, found)
