"""One dump, from rollout_data on every rank to one file: describe, agree, bring together, restore, write."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from slime_instrument._dump.agreement import Agreement, NotAgreed, default_store, not_armed
from slime_instrument._dump.atomic import clean_leftovers, write_atomically
from slime_instrument._dump.contribute import Seen
from slime_instrument._dump.exchange import own_shard, receive_all, send_own
from slime_instrument._dump.payload import build_payload
from slime_instrument._dump.provenance import describe
from slime_instrument._dump.saving import save
from slime_instrument._dump.shard import Contribution, contribute
from slime_instrument._dump.template import dump_path, dump_template
from slime_instrument._dump.topology import Topology, read_topology
from slime_instrument._dump.transport import megatron_transport
from slime_instrument._dump.zigzag import shard_lengths
from slime_instrument._errors import DumpError
from slime_instrument._format.schema import CONTEXT_PARALLEL_FIELDS

if TYPE_CHECKING:
    from slime_instrument._dump.dumper import Dumper

__all__ = ["dump"]

logger = logging.getLogger("slime_instrument")


def dump(runtime: Dumper, args: Any, rollout_id: int, rollout_data: dict[str, Any], seen: Seen) -> None:
    """Take part in the dump of one rollout; on the writer, write it. Raises :class:`DumpError` when it is given up."""
    topology = read_topology()
    if not topology.takes_part:
        return
    began = time.monotonic()
    settings = runtime.settings
    if topology.is_writer:
        runtime.background.flush()  # at most one file is pending
    cp_fields = tuple(dict.fromkeys((*CONTEXT_PARALLEL_FIELDS, *settings.cp_fields)))
    alone = len(topology.participants) == 1
    agreement = None if alone else _agreement(runtime, topology, rollout_id)
    try:
        contribution = _contribution(args, rollout_data, seen, topology, cp_fields)
    except BaseException as error:
        if agreement is not None:
            agreement.give_up(f"{type(error).__name__}: {error}")
        raise
    if agreement is None:
        shards = own_shard(contribution, topology, cp_fields)
    else:
        transport = megatron_transport(settings.timeout_s)
        try:
            if not topology.is_writer:
                send_own(contribution, topology, agreement, transport, settings.bucket_bytes)
                return
            shards = receive_all(contribution, topology, agreement, transport, cp_fields)
        except NotAgreed as error:
            raise DumpError(f"the dump of rollout {rollout_id} was given up: {error}") from None
        except Exception as error:
            agreement.give_up(f"{type(error).__name__}: {error}")
            raise
    payload = build_payload(shards, rollout_id=rollout_id, writer_rank=topology.rank)
    path = dump_path(dump_template(args), rollout_id, topology.rank)
    if runtime.dumps_written == 0:
        for leftover in clean_leftovers(path.parent):
            logger.info("slime_instrument: removed %s, left by a run that was killed", leftover)

    def write(blocked_s: float | None = None) -> None:
        size = write_atomically(path, lambda file: save(payload, file))
        runtime.wrote(rollout_id, path, size, time.monotonic() - began if blocked_s is None else blocked_s)

    if settings.async_write:
        blocked_s = time.monotonic() - began
        runtime.background.submit(lambda: write(blocked_s), lost=f"Rollout {rollout_id} has no train dump.")
    else:
        write()
    runtime.live.after_dump(args, rollout_id, payload, path)


def _agreement(runtime: Dumper, topology: Topology, rollout_id: int) -> Agreement:
    store = default_store()
    missing = not_armed(store, topology.participants)
    if missing:
        raise DumpError(
            f"rank(s) {missing} train without instrumentation; a dump needs all of ranks {list(topology.participants)}"
        )
    key = runtime.dump_key(rollout_id)
    return Agreement(store, key, topology.rank, topology.participants, runtime.settings.timeout_s)


def _contribution(
    args: Any,
    rollout_data: dict[str, Any],
    seen: Seen,
    topology: Topology,
    cp_fields: tuple[str, ...],
) -> Contribution:
    """This rank's part. The trainer's own dict is left as it is."""
    if seen.failure is not None:
        raise DumpError(f"a dump without a part would be wrong: {seen.failure}")
    data = dict(rollout_data)
    qkv_format = getattr(args, "qkv_format", "thd")
    padded = data.get("max_seq_lens") if qkv_format == "bshd" else None
    if seen.log_probs is not None:
        lengths = shard_lengths(
            data["total_lengths"], data["response_lengths"], topology.context_parallel, topology.context_rank, padded
        )
        data["log_probs"] = _without_holes(seen.log_probs, lengths)
    provenance = describe(data, topology, seen, cp_fields, qkv_format)
    return contribute(data, topology, cp_fields, padded=padded, provenance=provenance)


def _without_holes(values: Sequence[torch.Tensor | None], lengths: list[int]) -> list[torch.Tensor]:
    """NaN for samples that the loss never saw: they have no value, and 0.0 would be a log-prob."""
    like = next(value for value in values if value is not None)
    return [
        torch.full((length,), float("nan"), dtype=like.dtype, device=like.device) if value is None else value
        for value, length in zip(values, lengths, strict=True)
    ]
