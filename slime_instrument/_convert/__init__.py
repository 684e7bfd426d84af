"""Per-rank train dumps of one rollout, slime's old ones, miles' and Relax's, as one v2 dump with exact values."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from slime_instrument._convert.layout import Layout, Place, find_layout, padded_lengths
from slime_instrument._dump.agree import Topology
from slime_instrument._dump.contribute import contribute
from slime_instrument._dump.file import Disk, write_dump
from slime_instrument._dump.payload import Restored, build_payload, put_together
from slime_instrument._errors import DumpError, DumpFormatError
from slime_instrument._format.containers import unusable
from slime_instrument._format.dumps import (
    RankData,
    RolloutDump,
    TrainDump,
    read_rollout_dump,
    read_train_dump,
    train_dump_of,
)
from slime_instrument._format.schedule import schedule_of
from slime_instrument._format.schema import CONTEXT_PARALLEL_FIELDS, ID_COLUMNS, SAMPLER_HEAD_FIELDS, SHARDED_FIELDS
from slime_instrument._format.values import (
    as_ints,
    as_list,
    brief,
    holds_whole_numbers,
    is_whole_number,
    length_of,
    show,
    whole_number,
)

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Converted:
    """A converted dump.

    Attributes:
        payload: the v2 file's content.
        dump: the same as a record, with the old files as its paths.
        layout: the parallel sizes of the run.
        warnings: what is not in the result, or not proven.
    """

    payload: dict[str, Any]
    dump: TrainDump
    layout: Layout
    warnings: list[str]

    def as_dict(self) -> dict[str, Any]:
        """What ``slime-instrument convert --json`` prints."""
        return {
            "n_samples": len(self.payload["samples"]),
            "rollout_id": self.payload["rollout_id"],
            "layout": self.layout.as_dict(),
            "warnings": self.warnings,
        }


def convert_files(
    paths: Sequence[PathLike],
    output: PathLike,
    *,
    rollout: PathLike | None = None,
    allow_pickle: bool = False,
    **sizes: Any,
) -> Converted:
    """Convert the old files of one rollout and write one v2 file, whole or not at all.

    Args:
        paths: the old files, in any order.
        output: the file to write; never one of ``paths``.
        rollout: the rollout dump, from which positions are known for sure.
        allow_pickle: read a rollout dump with objects of arbitrary classes; this can run code from it.
        sizes: ``tp``, ``pp``, ``cp``, ``dp``, ``order`` of the run, as for :func:`convert_dump`.

    Raises:
        DumpFormatError: a file is no old dump, the files do not belong together, or their layout is not proven.
        DumpError: the result cannot be written.
        OSError: a file is missing or may not be read.
    """
    dump = read_train_dump(list(paths))
    source = read_rollout_dump(rollout, allow_pickle=allow_pickle) if rollout is not None else None
    target = Path(output)
    if target.exists() and any(target.samefile(path) for path in dump.paths):
        raise unusable(target, "is one of the files to convert", next_step="Give another name with -o.")
    converted = convert_dump(dump, rollout=source, **sizes)
    write_dump(converted.payload, target, Disk(lambda text: None))
    return converted


def convert_dump(
    dump: TrainDump,
    *,
    rollout: RolloutDump | None = None,
    tp: int | None = None,
    pp: int | None = None,
    cp: int | None = None,
    dp: int | None = None,
    order: str | None = None,
) -> Converted:
    """Convert old per-rank files in memory.

    A data-parallel shard of which a context-parallel part is missing is left out and named: nothing is made up.

    Args:
        dump: the per-rank files of one rollout.
        rollout: the rollout dump they came from.
        tp, pp, cp, dp: parallel sizes of the run; what is None is inferred from the files and proven.
        order: how ranks are counted, fastest first; Megatron's default is ``tp-cp-dp-pp``.

    Raises:
        DumpFormatError: not old files, or no layout that is proven, or no whole shard.
    """
    if dump.kind != "train-rank":
        raise unusable(dump.path, "is a v2 dump already")
    refuse_malformed(dump.ranks)
    layout = find_layout(dump.ranks, tp=tp, pp=pp, cp=cp, dp=dp, order=order)
    warnings: list[str] = []
    present = {rank.rank for rank in dump.ranks}
    missing = sorted(set(range(layout.world)) - present)
    if missing:
        warnings.append(f"{len(present)} of {layout.world} rank files are there; missing: ranks {show(missing)}")
    sources = _sources(dump.ranks, layout, warnings)
    if not sources:
        raise unusable(dump.path, f"and its {len(present)} files hold no whole data-parallel shard")
    cut = sorted({name for rank in dump.ranks for name in rank.cut})
    if cut:
        warnings.append(f"left out: {show(cut)}, of which the files hold pieces that belong to no sample")
    positions, notes = find_positions([dict(ranks[0].rollout_data) for ranks in sources.values()], rollout)
    warnings += notes
    try:
        parts = _restored(sources, layout, positions)
    except DumpError as error:
        raise DumpFormatError(f"{dump.path}: {error} Nothing was converted.") from None
    payload = build_payload(parts, rollout_id=dump.rollout_id or 0, writer_rank=parts[0].head.rank)
    record = replace(train_dump_of(dump.path, payload), paths=dump.paths)
    warnings += _coverage(record, len(rollout.samples) if rollout is not None else None)
    return Converted(payload, record, layout, warnings)


def _sources(ranks: Sequence[RankData], layout: Layout, warnings: list[str]) -> dict[int, list[RankData]]:
    """Per data-parallel rank one file for each context-parallel rank: the last stage there is, lowest tensor rank."""
    best: dict[tuple[int, int], tuple[Place, RankData]] = {}
    for rank in ranks:
        place = layout.place(rank.rank)
        other = best.get((place.dp, place.cp))
        if other is None or (place.pp, -place.tp) > (other[0].pp, -other[0].tp):
            best[place.dp, place.cp] = (place, rank)
    sources = {}
    for dp in range(layout.dp):
        own = [best[dp, cp] for cp in range(layout.cp) if (dp, cp) in best]
        if len(own) < layout.cp:
            if own:
                gone = sorted(set(range(layout.cp)) - {place.cp for place, _ in own})
                warnings.append(
                    f"data-parallel rank {dp} is left out: its context-parallel ranks {show(gone)} are missing"
                )
            continue
        if any(place.pp < layout.pp - 1 for place, _ in own):
            warnings.append(
                f"data-parallel rank {dp}: no file of its last pipeline stage, so no log_probs or advantages"
            )
        sources[dp] = [rank for _, rank in own]
    return sources


def _restored(sources: dict[int, list[RankData]], layout: Layout, positions: list[list[int]] | None) -> list[Restored]:
    """Raises :class:`DumpError` where the parts do not make a whole."""
    contributions = []
    for number, (dp, ranks) in enumerate(sources.items()):
        # A stage before the last lacks fields; what one part lacks cannot be restored from the others.
        common = set.intersection(*({k for k, v in rank.rollout_data.items() if v is not None} for rank in ranks))
        for cp, rank in enumerate(ranks):
            data = whole_fields(rank, common)
            padded = padded_lengths(data)
            if positions is not None:
                data["partition"] = positions[number]
            contributions.append(
                contribute(
                    data,
                    _topology(rank.rank, dp, cp, layout),
                    SHARDED_FIELDS,
                    padded=padded,
                    provenance=_provenance(data, layout, padded is not None, ranks),
                )
            )
    parts = put_together(contributions, layout.cp, SHARDED_FIELDS)
    for name, why in ((n, w) for part in parts for n, w in {**part.head.left_out, **part.left_out}.items()):
        raise DumpError(f"{name}: {why}.")
    return parts


def _topology(rank: int, dp: int, cp: int, layout: Layout) -> Topology:
    return Topology(
        rank=rank,
        tensor_parallel=layout.tp,
        tensor_rank=0,
        pipeline_parallel=layout.pp,
        context_parallel=layout.cp,
        context_rank=cp,
        data_parallel=layout.dp,
        data_rank=dp,
        last_stage=True,
        participants=(rank,),
    )


def _provenance(data: dict[str, Any], layout: Layout, bshd: bool, ranks: Sequence[RankData]) -> dict[str, Any]:
    from slime_instrument import __version__

    of_rollout = ("rollout_log_probs", "teacher_log_probs", *SAMPLER_HEAD_FIELDS)
    present = [name for name in SHARDED_FIELDS if data.get(name) is not None]
    described: dict[str, Any] = {
        "slime_instrument": __version__,
        "tensor_parallel": layout.tp,
        "pipeline_parallel": layout.pp,
        "context_parallel": layout.cp,
        "data_parallel": layout.dp,
        "route": "converted",
        "layout": layout.how,
        "qkv_format": "bshd" if bshd else "thd",
        "fields": {name: "rollout" if name in of_rollout else "recomputed" for name in present},
        "converted_from": [rank.path.name for rank in ranks],
    }
    if "log_probs" not in present:
        described["log_probs"] = "not in the old files: slime did not compute them before the training steps"
    return described


def _coverage(dump: TrainDump, n_rollout: int | None) -> list[str]:
    """Whether the result is short of what the run's schedule, or else the batch, counts."""
    n, rewards = len(dump.samples), length_of(dump.whole_batch.get("raw_reward"))
    positions = [whole_number(sample.get("rollout_position")) for sample in dump.samples]
    schedule = schedule_of(
        dump.samples, dump.dp_shards, positions=positions, batch=rewards or n_rollout, rewards=rewards
    )
    total = schedule.n_scheduled if schedule.n_scheduled is not None else n_rollout if rewards is None else rewards
    if total is None or n >= total:
        return []
    return [f"{n} of {total} samples are in the result: files of data-parallel ranks are missing"]


# --- what old per-rank files hold, and where their samples were in the rollout, which they do not say ---


_LARGEST_RANK = 1 << 14  # layouts are tried one by one; no run of an old release was anywhere near


def refuse_malformed(ranks: Sequence[RankData]) -> None:
    """Refuse files whose columns are not what slime writes: what follows takes types and counts for granted.

    Raises:
        DumpFormatError: names the file, the column, what was expected and what was found.
    """
    for rank in ranks:
        trouble = _trouble(rank)
        if trouble is not None:
            raise unusable(rank.path, trouble, next_step="slime-instrument validate says more.")


def whole_fields(rank: RankData, common: set[str]) -> dict[str, Any]:
    """The rank's columns, with values per token as tensors and the teacher's cut to the response.

    Args:
        rank: a file that :func:`refuse_malformed` lets pass.
        common: the response-level fields to keep.
    """
    data = {name: value for name, value in rank.rollout_data.items() if name not in SHARDED_FIELDS or name in common}
    for name in ("total_lengths", "response_lengths"):
        data[name] = as_ints(data[name])
    for name in ID_COLUMNS:
        if data.get(name) is not None:
            data[name] = as_list(data[name])
    for name, dtype in (("tokens", torch.int64), ("loss_masks", torch.int32)):
        values = data.get(name)
        if isinstance(values, list):
            listed = (one for one in values if isinstance(one, list))
            kind = dtype if all(holds_whole_numbers(one) for one in listed) else torch.float32
            data[name] = [torch.tensor(one, dtype=kind) if isinstance(one, list) else one for one in values]
    for name in CONTEXT_PARALLEL_FIELDS:
        values = data.get(name)
        if not isinstance(values, (list, tuple)):
            continue
        tensors = [
            value if isinstance(value, torch.Tensor) or value is None else torch.tensor(value, dtype=torch.float32)
            for value in values
        ]
        if name == "teacher_log_probs":
            # Up to v0.2.1 slime does not slice them; some servers answer for the prompt too.
            lengths = zip(tensors, data["total_lengths"], data["response_lengths"], strict=True)
            tensors = [
                one[len(one) - response :] if one is not None and len(one) == total > response else one
                for one, total, response in lengths
            ]
        data[name] = tensors
    return data


def _trouble(rank: RankData) -> str | None:
    if not 0 <= rank.rank < _LARGEST_RANK:
        return f"is of rank {rank.rank}, expected one of 0 to {_LARGEST_RANK - 1}"
    if rank.cp_size is not None and not 0 <= (rank.cp_rank or 0) < rank.cp_size:
        return f"says that it is of context-parallel rank {rank.cp_rank} of {rank.cp_size}"
    data = rank.rollout_data
    if rank.qkv_format not in (None, "thd", "bshd"):
        return f"has the layout {brief(rank.qkv_format)}, expected thd or bshd"
    if rank.qkv_format == "bshd" and data.get("max_seq_lens") is None:
        return "has the layout bshd without max_seq_lens, so that its chunks are not known"
    totals, responses = as_ints(data.get("total_lengths")), as_ints(data.get("response_lengths"))
    if totals is None or responses is None or len(totals) != len(responses):
        return "has no lists total_lengths and response_lengths of whole numbers, one per sample"
    bad = next((i for i, pair in enumerate(zip(responses, totals, strict=True)) if not 0 <= pair[0] <= pair[1]), None)
    if bad is not None:
        return f"states {responses[bad]} response tokens of {totals[bad]} in all for sample {bad}"
    n = len(responses)
    tokens = as_list(data.get("tokens"))
    if tokens is None or len(tokens) != n or not all(map(holds_whole_numbers, tokens)):
        return f"has no list tokens with whole numbers for each of {n} samples"
    for name in (*ID_COLUMNS, "max_seq_lens"):
        column = data.get(name)
        if column is None:
            continue
        values = as_list(column)
        if values is None or len(values) != n or not all(one is None or is_whole_number(one) for one in values):
            return f"has {brief(column)} under {name}, expected a whole number for each of {n} samples"
    for name in ("loss_masks", *CONTEXT_PARALLEL_FIELDS):
        column = data.get(name)
        if isinstance(column, (list, tuple)) and not all(one is None or _holds_numbers(one) for one in column):
            i = next(i for i, one in enumerate(column) if one is not None and not _holds_numbers(one))
            return f"has {brief(column[i])} under {name} of sample {i}, expected numbers"
        if column is not None and not isinstance(column, (list, tuple)):
            return f"has {brief(column)} under {name}, expected a list with one entry per sample"
    return None


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 1 and not value.is_complex()
    return isinstance(value, (list, tuple)) and all(type(item) in (int, float) for item in value)


def find_positions(
    shards: Sequence[dict[str, Any]], rollout: RolloutDump | None
) -> tuple[list[list[int]] | None, list[str]]:
    """Rollout position of every sample, shard by shard, and what to know about it.

    Args:
        shards: rollout_data of each data-parallel rank.
        rollout: the rollout dump; its tokens tell. Without it unique indices do, in their order.

    Returns:
        The positions, or None where they cannot be known; and warnings.
    """
    tokens = [[tuple(as_ints(one) or ()) for one in shard.get("tokens") or ()] for shard in shards]
    indices: list[Sequence[int | None]] = []
    for shard, own in zip(shards, tokens, strict=True):
        indices.append(as_ints(shard.get("sample_indices")) or [None] * len(own))
    if rollout is not None:
        return _by_tokens(tokens, indices, rollout)
    return _by_indices(shards, indices)


def _by_tokens(
    tokens: list[list[tuple[int, ...]]], indices: Sequence[Sequence[int | None]], rollout: RolloutDump
) -> tuple[list[list[int]] | None, list[str]]:
    places: dict[tuple[int, ...], list[int]] = {}
    for position, source in enumerate(rollout.samples):
        places.setdefault(tuple(as_ints(source.get("tokens")) or ()), []).append(position)
    found: list[list[int]] = []
    taken: set[int] = set()
    unknown: list[str] = []
    for own, numbers in zip(tokens, indices, strict=True):
        found.append([])
        for one, index in zip(own, numbers, strict=True):
            candidates = places.get(one, [])
            if len(candidates) > 1:
                # Equal answers to one prompt: only the index can tell them apart.
                candidates = [p for p in candidates if index is not None and rollout.samples[p].get("index") == index]
            if len(candidates) != 1 or candidates[0] in taken:
                unknown.append(f"sample_index {index} ({len(candidates)} places)")
                continue
            taken.add(candidates[0])
            found[-1].append(candidates[0])
    if unknown:
        message = (
            f"positions are not known: {len(unknown)} samples have no place of their own in {rollout.path}: "
            f"{show(unknown, 4)}"
        )
        return None, [message]
    return found, []


def _by_indices(
    shards: Sequence[dict[str, Any]], indices: Sequence[Sequence[int | None]]
) -> tuple[list[list[int]] | None, list[str]]:
    known = [index for own in indices for index in own if index is not None]
    n = sum(map(len, indices))
    twice = sorted(index for index, count in Counter(known).items() if count > 1)
    if len(known) < n or twice:
        why = f"sample_indices repeat {show(twice)}" if twice else "sample_indices are not there"
        return None, [f"positions are not known: {why}; with the rollout dump (--rollout) they can be"]
    total = next((length for shard in shards if (length := length_of(shard.get("raw_reward"))) is not None), None)
    if total != n:
        of = "an unknown number" if total is None else str(total)
        return None, [f"positions are not known: the files hold {n} of {of} samples; with --rollout they can be"]
    order = {index: position for position, index in enumerate(sorted(known))}
    warning = "positions are the order of sample_indices; with the rollout dump (--rollout) they are proven"
    return [[order[index] for index in own if index is not None] for own in indices], [warning]
