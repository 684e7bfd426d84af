"""Cut a rollout dump down to the samples that matter, as a file that slime trains again.

Samples come with their whole group: a reward is normalised within it, so a sample alone would get another advantage.
Nothing in a sample is looked at that is not needed to choose it, and nothing in it is changed.
"""

from __future__ import annotations

import copyreg
import os
import pickle
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from slime_instrument._analysis.pair import GROUPED_ESTIMATORS, ReadPair, n_executions, prompt_groups, slimes_baseline
from slime_instrument._errors import DumpFormatError, InstrumentError, five_parts
from slime_instrument._format.containers import unusable
from slime_instrument._format.dumps import read_rollout_dump
from slime_instrument._format.references import TensorReference, count_references, references_in
from slime_instrument._format.safe_load import load_dump
from slime_instrument._format.schema import GROUP_ID_FIELDS
from slime_instrument._format.values import brief, number, whole_number


class NothingChosen(InstrumentError, ValueError):
    """What was asked for names no sample of the dump."""


@dataclass(frozen=True)
class Extract:
    """A file that was written.

    Attributes:
        path: the file.
        label: what its samples have in common, where the dump was split; else "".
        chosen: rollout positions that were asked for.
        positions: rollout positions in the file, in their order; those of whole groups.
        n_groups: how many groups they are.
        arguments: what slime must be told besides the run's own arguments, in order.
        warnings: why training may not be as in the whole run.
    """

    path: Path
    label: str
    chosen: tuple[int, ...]
    positions: tuple[int, ...]
    n_groups: int
    arguments: Mapping[str, str]
    warnings: tuple[str, ...]

    @property
    def command(self) -> str:
        """The arguments as they are typed."""
        return " ".join(f"{name} {shlex.quote(value)}" for name, value in self.arguments.items())

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": str(self.path),
            "label": self.label,
            "chosen": list(self.chosen),
            "positions": list(self.positions),
            "n_groups": self.n_groups,
            "n_samples": len(self.positions),
            "arguments": dict(self.arguments),
            "command": self.command,
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True)
class Source:
    """A rollout dump that samples are taken from.

    Attributes:
        path: the file.
        payload: its content, with every object as it was saved.
        samples: its samples, a list inside ``payload``.
        pair: the dump with its train dump, where one was given.
    """

    path: Path
    payload: Any
    samples: Sequence[dict[str, Any]]
    pair: ReadPair | None = None

    @property
    def arguments(self) -> Mapping[str, Any]:
        """slime's arguments as provenance records them; empty where it is not known."""
        found = self.pair.provenance.record.get("arguments") if self.pair is not None else None
        return found if isinstance(found, Mapping) else {}


def open_source(path: Path, pair: ReadPair | None = None, *, allow_pickle: bool = False) -> Source:
    """Read a rollout dump so that it can be written again.

    Args:
        path: the rollout dump.
        pair: the same with its train dump, for what only training knows.
        allow_pickle: read objects of arbitrary classes; this can run code from the file.

    Raises:
        DumpFormatError: not a rollout dump, not safe to read, or with objects that cannot be made here.
        OSError: the file is missing or may not be read.
    """
    # Refuses what is damaged, hostile or another dump.
    read = read_rollout_dump(path, allow_pickle=allow_pickle, compact=True)
    payload = _as_saved(path, allow_pickle, [type(reference) for _, reference in references_in(read.samples)])
    samples = payload["samples"] if isinstance(payload, dict) else payload
    return Source(path, payload, list(samples), pair)


def worst(pair: ReadPair, n: int) -> list[int]:
    """Positions of the ``n`` samples with the largest mean \\|δ\\|.

    Raises:
        NothingChosen: no sample has a token that can be compared.
    """
    from slime_instrument._analysis.compare import compare

    measured = [
        (one.mean_abs, one.position) for one in compare(pair.rollout, pair.train).samples if one.mean_abs is not None
    ]
    if not measured:
        raise NothingChosen(_nothing("--worst", "a sample with a token to compare", "none"))
    return [position for _, position in sorted(measured, key=lambda one: (-one[0], one[1]))[:n]]


def with_finding(pair: ReadPair, code: str) -> list[int]:
    """Positions of the samples that a finding names.

    Raises:
        NothingChosen: there is no such finding here.
    """
    found = findings(pair)
    if code not in found:
        known = f"one of {', '.join(found)}" if found else "a finding, of which these dumps have none"
        raise NothingChosen(_nothing("--finding", known, repr(code)))
    return found[code]


def findings(pair: ReadPair) -> dict[str, list[int]]:
    """Code -> positions of every finding on this pair: of the comparison, then of the audit."""
    from slime_instrument._analysis.audit import audit
    from slime_instrument._analysis.compare import compare

    found: dict[str, list[int]] = {}
    for one in compare(pair.rollout, pair.train).findings:
        found.setdefault(one.code, []).extend(one.samples)
    for other in audit(pair).findings:
        found.setdefault(other.code, []).extend(other.samples)
    return {code: sorted(set(positions)) for code, positions in found.items() if positions}


def split(source: Source, by: str, chosen: Sequence[int]) -> dict[str, list[int]]:
    """Positions apart by what they have in common.

    Args:
        source: the dump.
        by: ``status``, ``reward`` or ``finding``; the last needs a train dump.
        chosen: the positions to split.
    """
    parts: dict[str, list[int]] = {}
    if by == "finding":
        if source.pair is None:
            raise NothingChosen(_nothing("--split-by finding", "a train dump beside the rollout dump", "none"))
        wanted = set(chosen)
        for code, positions in findings(source.pair).items():
            parts[code] = [position for position in positions if position in wanted]
        named = {position for positions in parts.values() for position in positions}
        parts["none"] = [position for position in chosen if position not in named]
        return {code: positions for code, positions in parts.items() if positions}
    for position in chosen:
        value = source.samples[position].get(by)
        amount = number(value)
        label = f"{amount:g}" if amount is not None else brief(value)
        parts.setdefault(label, []).append(position)
    return parts


def extract(source: Source, chosen: Iterable[int], out: Path, label: str = "") -> Extract:
    """Write the chosen samples with their whole groups.

    Args:
        source: the dump.
        chosen: rollout positions.
        out: the file to write; it appears whole or not at all.
        label: what the samples have in common, for the record.

    Raises:
        NothingChosen: a position that the dump does not have, or none.
        OSError: the file cannot be written.
    """
    wanted = sorted(set(chosen))
    if not wanted or not 0 <= wanted[0] <= wanted[-1] < len(source.samples):
        last = len(source.samples) - 1
        raise NothingChosen(_nothing("samples", f"positions from 0 to {last}", ", ".join(map(str, wanted)) or "none"))
    groups = [group for group in prompt_groups(source.samples, source.arguments) if not set(group).isdisjoint(wanted)]
    positions = sorted(position for group in groups for position in group)
    samples = [source.samples[position] for position in positions]
    _write(source, [_own_storage(sample) for sample in samples], out)
    return Extract(
        path=out,
        label=label,
        chosen=tuple(wanted),
        positions=tuple(positions),
        n_groups=len(groups),
        arguments=_arguments(source, samples, positions, groups, out),
        warnings=(*_warnings(source, groups), *_about_references(samples, out)),
    )


def _arguments(
    source: Source,
    samples: Sequence[Mapping[str, Any]],
    positions: Sequence[int],
    groups: Sequence[Sequence[int]],
    out: Path,
) -> dict[str, str]:
    """One optimizer step over the whole file. slime formats the path: braces in it are doubled."""
    sizes = {len(group) for group in groups}
    batch = n_executions(samples)
    if source.pair is not None and not any(
        name in one for one in source.pair.train.samples for name in GROUP_ID_FIELDS
    ):
        batch = len(samples)  # releases up to v0.2.4 count samples
    found = {"--load-debug-rollout-data": str(out.absolute()).replace("{", "{{").replace("}", "}}")}
    if len(sizes) == 1:
        found["--rollout-batch-size"] = str(len(groups))
        found["--n-samples-per-prompt"] = str(sizes.pop())
    return {**found, "--global-batch-size": str(batch), "--start-rollout-id": "0", "--num-rollout": "1"}


def _warnings(source: Source, groups: Sequence[Sequence[int]]) -> Iterable[str]:
    arguments = source.arguments
    if len({len(group) for group in groups}) > 1:
        yield (
            "groups differ in size: slime takes all samples of the file as one group, whatever "
            "--n-samples-per-prompt says, and advantages come out differently"
        )
    estimator = arguments.get("advantage_estimator")
    baseline = slimes_baseline(len(source.samples), arguments)
    if estimator in GROUPED_ESTIMATORS and arguments.get("rewards_normalization") and baseline is not None:
        if baseline.whole_batch:
            yield (
                f"the run had {len(source.samples)} samples where its arguments say "
                f"{arguments['n_samples_per_prompt']} x {arguments['rollout_batch_size']}, so slime normalised rewards "
                "over all of them; these groups alone get other advantages"
            )
        elif sorted(map(tuple, groups)) != sorted(one for one in baseline.groups if one in set(map(tuple, groups))):
            yield "groups are not those that slime normalised rewards in, so advantages come out differently"
    if arguments.get("normalize_advantages"):
        yield "--normalize-advantages whitens over the whole batch; over these samples alone it gives other advantages"
    if not arguments:
        yield "no train dump with slime's arguments was given: whether advantages stay the same was not checked"
    if (whole_number(arguments.get("num_steps_per_rollout")) or 1) > 1:
        yield "the run took several optimizer steps per rollout; these arguments take one"


def _about_references(samples: Sequence[Mapping[str, Any]], out: Path) -> Iterable[str]:
    found = count_references(samples)
    if found.missing:
        yield f"{found}: slime cannot load those"
    if found.total > found.missing:
        yield f"{out.name} refers to {found.total - found.missing} tensors in files of the whole dump: keep those files"


def _as_saved(path: Path, allow_pickle: bool, references: Iterable[type[TensorReference]]) -> Any:
    """The content with NumPy arrays as they were saved, for which torch's safe loader is told their classes, and with
    ours in the place of slime's references."""
    kinds = [type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdg"]
    array: Any = numpy.ndarray
    reduced = [value for value in numpy.zeros(1).__reduce__()[:1] if callable(value)]
    scalar = [value for value in numpy.float64(0).__reduce__()[:1] if callable(value)]
    try:
        ours = {one.class_path: one for one in references}
        stand_ins: list[Any] = [(kind, name) for name, kind in ours.items()]
        with torch.serialization.safe_globals([array, numpy.dtype, *reduced, *scalar, *kinds, *stand_ins]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if allow_pickle:
            try:
                return torch.load(path, map_location="cpu", weights_only=False)
            except (ImportError, AttributeError) as missing:
                raise unusable(
                    path,
                    f"holds an object whose class is not here ({missing})",
                    next_step="Run this where slime is installed.",
                ) from missing
        if not _is_plain(payload := load_dump(path)):
            raise unusable(path, "holds values that would not be written as they were read") from error
        return payload


def _is_plain(value: Any) -> bool:
    """Whether a value read from a plain pickle is what it was: no array that became a tensor, no stand-in."""
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, bytes, TensorReference))


def _own_storage(sample: Mapping[str, Any]) -> dict[str, Any]:
    """The sample with tensors that do not carry the rest of a larger one into the file."""

    def own(value: Any) -> Any:
        if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
            return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
        return value

    return {name: own(value) for name, value in sample.items()}


def _write(source: Source, samples: list[dict[str, Any]], out: Path) -> None:
    head = (
        {key: value for key, value in source.payload.items() if key != "samples"}
        if isinstance(source.payload, dict)
        else {}
    )
    if not head:
        head = {"rollout_id": 0}  # a list, as dumps before 2025-07-23 were: newer slime wants a dict
    try:
        with tempfile.NamedTemporaryFile(dir=out.parent, prefix=f".{out.name}.", delete=False) as part:
            try:
                torch.save({**head, "samples": samples}, part, pickle_module=_pickle_for(samples))
                part.close()
                os.chmod(part.name, 0o666 & ~_umask())
                os.replace(part.name, out)
            except BaseException:
                os.unlink(part.name)
                raise
    except OSError as error:  # that of the file asked for, not of the one beside it
        raise OSError(error.errno, error.strerror, str(out)) from error


def _pickle_for(samples: Iterable[Mapping[str, Any]]) -> Any:
    """The pickle module to save ``samples`` with: Python's, unless they hold references."""
    return next((_WithReferences for _ in references_in(samples)), pickle)


class _WithReferences:
    """What ``torch.save(pickle_module=...)`` takes: references become slime's objects again, whose class need not be
    importable here. Python's pickler in C insists on importing it."""

    class Pickler(pickle._Pickler):
        # Of the pickler in Python; typeshed knows only the one in C.
        write: Callable[[bytes], Any]
        memoize: Callable[[Any], None]

        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, TensorReference):
                # Where slime finds it: after a move not where the dump says.
                path = value.path if value.file is None else str(value.file)
                return copyreg.__newobj__, (type(value),), {**value.state, "path": path}  # type: ignore[attr-defined]
            return NotImplemented

        def save_global(self, value: Any, name: str | None = None) -> None:
            if isinstance(value, type) and issubclass(value, TensorReference):
                module, _, own = value.class_path.rpartition(".")
                self.write(pickle.GLOBAL + f"{module}\n{own}\n".encode())
                self.memoize(value)
            else:
                super().save_global(value, name)  # type: ignore[misc]


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _nothing(subject: str, expected: str, found: str) -> str:
    return five_parts(
        subject,
        expected=expected,
        found=found,
        follows="Nothing was written.",
        next_step="slime-instrument compare names samples.",
    )


__all__ = [
    "DumpFormatError",
    "Extract",
    "NothingChosen",
    "Source",
    "extract",
    "findings",
    "open_source",
    "split",
    "with_finding",
    "worst",
]
