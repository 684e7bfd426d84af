"""A rollout dump of the user's in the place of the lab's own samples: trained as it is, sample by sample."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_instrument._errors import DumpFormatError, five_parts
from slime_instrument.lab._options import LabError

if TYPE_CHECKING:
    from slime_instrument._format.dumps import Sample


@dataclass(frozen=True)
class Rollout:
    """The samples of a rollout dump, and how slime counts them.

    Attributes:
        rollout_id: the dump's own number; the rollout is trained, and its train dump named, under it.
    """

    path: Path
    rollout_id: int
    samples: list[Sample]

    @classmethod
    def read(cls, path: Path) -> Rollout:
        """Read a rollout dump, without running code from it.

        Raises:
            LabError: the file cannot be read or holds no samples, or a sample has values of a wrong length.
        """
        from slime_instrument._format.dumps import read_rollout_dump

        try:
            dump = read_rollout_dump(path)
        except (OSError, DumpFormatError) as error:
            raise refused(path, "a rollout dump as slime writes it", str(error)) from None
        if not dump.samples:
            raise refused(path, "samples", "none")
        found = cls(path, dump.rollout_id or 0, dump.samples)
        for position, sample in enumerate(found.samples):
            found._check(position, sample)
        return found

    def _check(self, position: int, sample: Sample) -> None:
        tokens, length = sample.get("tokens"), sample.get("response_length")
        if tokens is None or not len(tokens):
            raise refused(self.path, f"tokens in sample {position}", repr(tokens))
        if not isinstance(length, int) or not 0 <= length <= len(tokens):
            raise refused(self.path, f"a response_length from 0 to {len(tokens)} in sample {position}", repr(length))
        for name in ("loss_mask", "rollout_log_probs"):
            values = sample.get(name)
            if values is not None and len(values) != length:
                raise refused(
                    self.path, f"{name} of {length} values, one per response token, in sample {position}",
                    f"{len(values)}",
                )  # fmt: skip

    def check_vocabulary(self, size: int) -> None:
        """Raise :class:`LabError` for a token that a vocabulary of this size does not have."""
        for position, sample in enumerate(self.samples):
            outside = next((token for token in map(int, sample["tokens"]) if not 0 <= token < size), None)
            if outside is not None:
                raise refused(
                    self.path,
                    f"tokens below {size}, the model's vocabulary",
                    f"{outside} in sample {position}",
                    "Train the model that sampled them: checkpoint=DIR.",
                )

    @property
    def n_samples(self) -> int:
        return len(self.samples)

    @property
    def n_rollouts(self) -> int:
        """What slime counts a batch in since v0.3.0: samples that name one rollout are one."""
        named = [sample.get("rollout_id") for sample in self.samples]
        return len({one for one in named if one is not None}) + sum(one is None for one in named)

    @cached_property
    def group_size(self) -> int | None:
        """Samples per prompt, where the samples of each group stand together and all groups have one size; else None.

        slime normalises rewards over groups that it counts off by this number, and over the whole batch where there
        is none.
        """
        runs: list[list[Any]] = []
        for sample in self.samples:
            group = sample.get("group_index")
            if group is None:
                return None
            if runs and runs[-1][0] == group:
                runs[-1].append(group)
            else:
                runs.append([group])
        several = len({run[0] for run in runs}) == len(runs) and len({len(run) for run in runs}) == 1
        return len(runs[0]) if several else None

    def of_target(self) -> list[Any]:
        """As objects of the target's own ``Sample``; training changes these and not what was read."""
        from slime.utils.types import Sample

        return [Sample.from_dict(dict(sample)) for sample in self.samples]


def refused(
    path: Path, expected: str, found: str, next_step: str = "Give a file of --save-debug-rollout-data."
) -> LabError:
    """The error for a dump that cannot be trained."""
    return LabError(
        five_parts(
            f"lab rollout {path}", expected=expected, found=found, follows="Nothing was trained.", next_step=next_step
        )
    )
