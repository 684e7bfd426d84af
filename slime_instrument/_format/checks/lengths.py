"""Does every value of a sample have the length that the sample says? Shared by train and rollout samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch

from slime_instrument._format.checks.context import V2Dump
from slime_instrument._format.checks.values import as_ints, length_of, nan_indices, whole_number
from slime_instrument._format.findings import Findings
from slime_instrument._format.schema import FORGOTTEN_CONTEXT_PARALLEL_FIELDS

__all__ = ["check_lengths", "check_ragged", "check_routed_experts", "check_unowned_tokens", "response_lengths_of"]


def check_lengths(dump: V2Dump, found: Findings) -> None:
    """Tokens against total_lengths, response-level fields and the mask against response_lengths."""
    forgotten = () if dump.has_provenance() else FORGOTTEN_CONTEXT_PARALLEL_FIELDS
    fields = [name for name in dump.response_fields() if name not in forgotten]
    for i, sample in dump.samples:
        response, total = whole_number(sample.get("response_lengths")), whole_number(sample.get("total_lengths"))
        tokens = length_of(sample.get("tokens"))
        if total is not None and tokens is not None and tokens != total:
            message = f"sample {i}: tokens has {tokens} entries, but total_lengths is {total}"
            found.error("length", message, sample=i, field="tokens")
        total = total if total is not None else tokens
        response_lengths_of(i, sample, response, total, ["loss_masks", *fields], found)
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
    i: int, sample: dict[str, Any], response: int | None, total: int | None, fields: Iterable[str], found: Findings
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


def check_ragged(i: int, sample: dict[str, Any], response: int | None, found: Findings) -> None:
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


def check_routed_experts(i: int, sample: dict[str, Any], tokens: int | None, found: Findings) -> None:
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
    if isinstance(value, torch.Tensor) and value.dim() != 3:
        message = f"sample {i}: {name} has shape {tuple(value.shape)}, expected (tokens - 1, layers, top-k)"
        found.error("routed-experts", message, sample=i, field=name)


def check_unowned_tokens(dump: V2Dump, found: Findings) -> None:
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
