"""Several rollouts: which dumps belong together, and how the mismatch moves from one to the next."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_instrument._analysis.compare import Comparison
from slime_instrument._errors import DumpFormatError
from slime_instrument._format.containers import unusable
from slime_instrument._format.dumps import detect_kind
from slime_instrument._format.safe_load import load_dump
from slime_instrument._format.values import whole_number, whole_number_in

__all__ = ["FilePair", "pair_files", "trend"]

_SERIES = ("ess", "k1", "k2", "k3", "token_mult_prob_error", "chi2_token", "n_tokens", "n_joined")


@dataclass(frozen=True)
class FilePair:
    """The dumps of one rollout. ``train``: one v2 file, or all old per-rank files."""

    rollout_id: int | None
    rollout: Path
    train: tuple[Path, ...]


def pair_files(rollout: Path, train: Sequence[Path], *, allow_pickle: bool = False) -> list[FilePair]:
    """Files, or folders of files, as pairs of one rollout each, by rollout id. Evaluations are left out.

    Args:
        rollout: a rollout dump or a folder of them.
        train: train dumps: v2 files, old per-rank files, or folders of them.
        allow_pickle: read rollout dumps with objects of arbitrary classes; this can run code from them.

    Raises:
        DumpFormatError: nothing belongs together, or a file is no dump.
        OSError: a file is missing or may not be read.
    """
    if rollout.is_file() and len(train) == 1 and train[0].is_file():
        return [FilePair(None, rollout, (train[0],))]
    rollouts: dict[Any, Path] = {}
    for path in _files([rollout]):
        kind, rollout_id = _identify(path, allow_pickle)
        if kind == "rollout":
            if rollout_id in rollouts:
                raise unusable(path, f"is of rollout {rollout_id}, and so is {rollouts[rollout_id]}")
            rollouts[rollout_id] = path
        elif path == rollout:
            raise unusable(path, f"is a {kind} dump; expected the dump of a training rollout")
    trained: dict[Any, list[Path]] = {}
    for path in _files(train):
        kind, rollout_id = _identify(path, allow_pickle)
        if kind.startswith("train"):
            trained.setdefault(rollout_id, []).append(path)
        elif path in train:
            raise unusable(path, f"is a {kind} dump, not a train dump")
    both = [key for key in rollouts if key in trained]
    if not both:
        raise DumpFormatError(
            f"{rollout}: has rollouts {sorted(map(str, rollouts))}, but the train dumps are of "
            f"{sorted(map(str, trained))}. Nothing was compared."
        )
    order = sorted(both, key=lambda key: (key is None, key if key is not None else 0))
    return [FilePair(key, rollouts[key], tuple(sorted(trained[key]))) for key in order]


def trend(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Series over rollouts, in the order given: metrics, and which findings each rollout has."""
    return {
        "rollout_id": [one["rollout_id"] for one in comparisons],
        **{f"abs_diff_{name}": [one["abs_diff"][name] for one in comparisons] for name in ("mean", "p99", "max")},
        **{name: [one[name] for one in comparisons] for name in _SERIES},
        "findings": [[finding.code for finding in one.diagnosis] for one in comparisons],
    }


def _files(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        found += sorted(path.glob("*.pt")) if path.is_dir() else [path]
    return found


def _identify(path: Path, allow_pickle: bool) -> tuple[str, int | None]:
    """Kind and rollout id. Loading maps the tensors; their values stay unread."""
    payload = load_dump(path, allow_pickle=allow_pickle, compact=True)
    kind = detect_kind(path, payload)
    stated = whole_number(payload.get("rollout_id")) if isinstance(payload, dict) else None
    if stated is not None:
        return kind, stated
    return kind, whole_number_in("".join(re.findall(r"[0-9]", path.stem.split("_")[0])))
