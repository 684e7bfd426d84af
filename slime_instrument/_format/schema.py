"""The names in dump files, and what each field of a sample counts.

Standard library only: the training side imports this module too. The v2 file is slime's own format (its pull request
2266), key for key; what this package adds lives in :data:`PROVENANCE` of each entry of ``dp_shards`` and nowhere else.
"""

from __future__ import annotations

from typing import Final, Literal

__all__ = [
    "COLUMN_TO_SAMPLE_KEY",
    "CONTEXT_PARALLEL_FIELDS",
    "FORGOTTEN_CONTEXT_PARALLEL_FIELDS",
    "FORMAT_VERSION",
    "GROUP_ID_FIELDS",
    "ID_COLUMNS",
    "LAYOUT_FIELDS",
    "NATIVE_CONTEXT_PARALLEL_FIELDS",
    "PROVENANCE",
    "REQUIRED_SAMPLE_FIELDS",
    "REQUIRED_TOP_LEVEL_KEYS",
    "SAMPLER_HEAD_FIELDS",
    "SHARDED_FIELDS",
    "WHOLE_BATCH_FIELDS",
    "DumpKind",
]

FORMAT_VERSION: Final = 2

DumpKind = Literal["train-v2", "train-rank", "rollout", "rollout-eval"]

# Top level of a v2 file. Any other key there is a whole-batch field.
REQUIRED_TOP_LEVEL_KEYS: Final = ("format_version", "rollout_id", "rank", "samples", "dp_shards")

WHOLE_BATCH_FIELDS: Final = ("raw_reward",)
"""Fields that hold the whole rollout batch on every rank, indexed by rollout position. Stored once, at the top."""

LAYOUT_FIELDS: Final = ("micro_batch_indices", "num_microbatches", "global_batch_sizes")
"""The schedule of one data-parallel rank. Stored in ``dp_shards``, whatever its length."""

ID_COLUMNS: Final = ("sample_indices", "partition")
"""Columns of rollout_data that identify samples. A shard keeps the column, a sample its own value of it."""

COLUMN_TO_SAMPLE_KEY: Final = {"sample_indices": "sample_index", "partition": "rollout_position"}

GROUP_ID_FIELDS: Final = ("rollout_ids", "group_ids")
"""Per-sample id of the execution that a sample came from, newest name first. ``global_batch_sizes`` counts these."""

NATIVE_CONTEXT_PARALLEL_FIELDS: Final = (
    "rollout_log_probs",
    "teacher_log_probs",
    "log_probs",
    "ref_log_probs",
    "values",
    "advantages",
    "returns",
    "kl",
    "entropy",
    "opd_reverse_kl",
)
"""Response-level fields that slime restores from context-parallel shards, in the order in which it does."""

FORGOTTEN_CONTEXT_PARALLEL_FIELDS: Final = ("ref_entropy", "teacher_entropy")
"""Sharded in the same way, but missing from slime's list: its native dump holds one rank's part of them."""

CONTEXT_PARALLEL_FIELDS: Final = NATIVE_CONTEXT_PARALLEL_FIELDS + FORGOTTEN_CONTEXT_PARALLEL_FIELDS
"""Every field with one value per response token that arrives in context-parallel shards."""

SAMPLER_HEAD_FIELDS: Final = ("rollout_topk_token_ids", "rollout_topk_log_probs")
"""The sampler's k likeliest tokens at each response token, shape ``(response, k)``, int32 and float32. Sharded in the
same way, whole with ``--allgather-cp``; slime restores them without a cast, before the others."""

SHARDED_FIELDS: Final = SAMPLER_HEAD_FIELDS + CONTEXT_PARALLEL_FIELDS
"""Every field that may arrive in context-parallel shards, in the order in which a file has them."""

REQUIRED_SAMPLE_FIELDS: Final = ("data_parallel_rank", "tokens", "total_lengths", "response_lengths", "loss_masks")

PROVENANCE: Final = "provenance"
"""Key of ``dp_shards[i]`` that holds what is ours alone. Absent from slime's native files."""
