"""Validate dump files: every fault of every file, not the first one found.

Adding a check means adding a function to the list of its kind below.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slime_instrument._errors import DumpFormatError
from slime_instrument._format.dumps import (
    RolloutDump,
    TrainDump,
    detect_kind,
    read_rollout_dump,
    rollout_dump_of,
    train_dump_of,
)
from slime_instrument._format.pairs import find_pairs
from slime_instrument._format.safe_load import load_dump
from slime_instrument._validate.batch import (
    check_coverage,
    check_mask_sums,
    check_order,
    check_rank_coverage,
    check_schedule,
    check_shard_count,
    check_shards,
)
from slime_instrument._validate.problems import Problem, Problems, V2Dump, ValidationReport
from slime_instrument._validate.rollout import check_against_rollout, check_local_reward
from slime_instrument._validate.samples import (
    check_field_coverage,
    check_lengths,
    check_rank_file,
    check_references,
    check_rollout_dump,
    check_sample_types,
    check_top_level,
    check_unowned_tokens,
)

V2_CHECKS: tuple[Callable[[V2Dump, Problems], None], ...] = (
    check_top_level,
    check_sample_types,
    check_field_coverage,
    check_lengths,
    check_references,
    check_unowned_tokens,
    check_order,
    check_shards,
    check_shard_count,
    check_coverage,
    check_schedule,
    check_mask_sums,
    check_local_reward,
    check_against_rollout,
)

PathLike = str | os.PathLike[str]


def validate_files(
    paths: Sequence[PathLike], *, rollout: PathLike | None = None, allow_pickle: bool = False
) -> ValidationReport:
    """Validate dumps of any kind.

    Args:
        paths: v2 files, rollout dumps, old per-rank files. Per-rank files of one rollout are checked together too.
        rollout: the rollout dump that the train dumps came from, or a folder that holds that of each.
        allow_pickle: read rollout dumps with objects of arbitrary classes; this can run code from them.

    Returns:
        The problems. A file that cannot be read is an error with code ``unreadable``; the others are still checked.

    Raises:
        DumpFormatError: ``rollout`` cannot be read or is no rollout dump.
        OSError: ``rollout`` is missing or may not be read.
    """
    if rollout is not None and Path(rollout).is_dir():
        return _each_with_its_own([*map(Path, paths)], Path(rollout), allow_pickle)
    source = read_rollout_dump(rollout, allow_pickle=allow_pickle, compact=True) if rollout is not None else None
    report = ValidationReport()
    by_rollout: dict[int | None, list[TrainDump]] = {}
    for path in map(Path, paths):
        try:
            payload = load_dump(path, allow_pickle=allow_pickle, compact=True)
            kind = detect_kind(path, payload)
            if kind == "train-v2":
                report.add(validate_v2(path, payload, source))
                continue
            found = Problems(path)
            if kind == "train-rank":
                dump = train_dump_of(path, payload)
                check_rank_file(dump.ranks[0], found)
                by_rollout.setdefault(dump.rollout_id, []).append(dump)
            else:
                check_rollout_dump(rollout_dump_of(path, payload), found)
        except (DumpFormatError, OSError) as error:
            report.errors.append(Problem("unreadable", _one_line(error), str(path)))
            continue
        report.add(found)
    for dumps in by_rollout.values():
        found = Problems(dumps[0].path)
        check_rank_coverage(dumps, source, found)
        report.add(found)
    return report


def _each_with_its_own(paths: Sequence[Path], folder: Path, allow_pickle: bool) -> ValidationReport:
    """Each train dump against the rollout dump of its rollout in ``folder``."""
    pairing = find_pairs([*paths, folder], allow_pickle=allow_pickle)
    own = {path: pair.rollout for pair in pairing.pairs for path in pair.train}
    # A pair has one train dump: of several of one rollout, the others are looked for by themselves.
    for second in pairing.skipped:
        if second.file in paths and second.lone is None and not second.unreadable:
            found = find_pairs([second.file, folder], allow_pickle=allow_pickle)
            own.update({path: pair.rollout for pair in found.pairs for path in pair.train})
    together: dict[Path | None, list[Path]] = {}
    for path in paths:
        together.setdefault(own.get(path), []).append(path)
    report = ValidationReport()
    for source, members in together.items():
        part = validate_files(members, rollout=source, allow_pickle=allow_pickle)
        report.errors += part.errors
        report.warnings += part.warnings
    alone = [
        one for one in pairing.skipped if one.file in paths and one.lone is not None and one.lone.kind != "rollout"
    ]
    report.errors += [Problem("no-rollout-dump", one.reason, str(one.file)) for one in alone]
    return report


def validate_v2(path: Path, payload: dict[str, Any], rollout: RolloutDump | None = None) -> Problems:
    """Every check of a v2 payload, in memory or loaded from ``path``."""
    dump, found = V2Dump(payload, rollout), Problems(path)
    for check in V2_CHECKS:
        check(dump, found)
    return found


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}. Not read."
    return str(error)
