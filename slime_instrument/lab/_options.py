"""What a lab run is asked for, what it answers, and how it fails. Plain values: they cross a process boundary."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from slime_instrument._errors import InstrumentError

_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+")
_PATHS = ("out", "slime", "core", "rollout_log_probs", "plugin", "checkpoint", "rollout", "export_checkpoint")


class LabError(InstrumentError, RuntimeError):
    """A rank failed, died or did not answer in time. Every process of the run has ended when this is raised.

    ``tracebacks`` maps ranks to their tracebacks, the first failure first; rank -1 is the process that imports slime.
    """

    def __init__(self, message: str, tracebacks: Mapping[int, str] | None = None) -> None:
        self.tracebacks = dict(tracebacks or {})
        details = [f"--- {'set-up' if rank < 0 else f'rank {rank}'}\n{text}" for rank, text in self.tracebacks.items()]
        super().__init__("\n".join([message, *details]))


@dataclass(frozen=True)
class LabOptions:
    """One training run. Only ``out`` is required: alone it trains one rollout of the miniature in a single process."""

    out: Path
    slime: Path | None = None
    """A slime checkout; None is the bundled miniature, which has neither custom functions nor every loss of slime."""
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    rollouts: int = 1
    steps: int = 1
    """Optimizer steps per rollout."""
    instrumented: bool = True
    overrides: Mapping[str, object] = field(default_factory=dict)
    """slime arguments by name, for example ``{"use_rollout_logprobs": True}``. A name that the target does not read is
    refused. A custom function given by its dotted path must be called by some rank, or the run fails."""
    with_ref: bool = False
    core: Path | None = None
    """A folder with another ``megatron.core``: slime v0.2.0 and v0.2.1 want 0.14.0. None: for these two releases
    ``$SLIME_OLD_CORE``, for all others the installed one."""
    dump_name: str | None = None
    """File name template below ``out/train_data``. None: one file per rollout where something merges the ranks' dumps
    (the instrumentation, or slime itself since #2266), else one per rank."""
    rollout_log_probs: Path | None = None
    """A file of :func:`rollout_log_probs_from`; without one, the rollout's log-probs are noise."""
    plugin: Path | None = None
    """A Python file that is executed before slime is imported; its ``before_slime()``, if any, is called then."""
    rank_hook: str | None = None
    """``file.py:function``, called as ``function(rank, actor_module, args)`` in each rank before the actor's init."""
    environment: Mapping[str, str] = field(default_factory=dict)
    save_weights: bool = False
    checkpoint: Path | None = None
    """A folder with a Hugging Face checkpoint of the Llama shape (``config.json`` and safetensors), to train in the
    place of the tiny model. Its sizes win over the lab's; the learning rate becomes 1e-6."""
    export_checkpoint: Path | None = None
    """A folder for the weights after the last rollout, in the format of ``checkpoint`` and with its other files, such
    as the tokenizer. Tensors have the type that is trained in."""
    rollout: Path | None = None
    """A rollout dump to train in the place of made-up samples, all of it and in its order. For several rollouts the
    path has ``{rollout_id}``, which counts from 0. ``rollout_batch_size``, ``n_samples_per_prompt`` and
    ``global_batch_size`` follow from it."""
    samples: str = "default"
    """``default``: eight samples with responses of 2 to 21 tokens. ``long``: responses of 13 tokens and more.
    ``uneven``: one sample more than ranks divide. ``edge``, or ``edge:KIND,KIND``: the kinds in
    ``slime_instrument.lab.EDGE_KINDS``."""
    extras: tuple[str, ...] = ()
    """What samples carry beyond tokens and log-probs: names in ``slime_instrument.lab.EXTRAS``."""
    fault: str | None = None
    """A fault to plant in this run, ``NAME`` or ``NAME:VALUE``: names in ``slime_instrument.lab.FAULTS``."""
    timeout: float = 240.0

    def __post_init__(self) -> None:
        for name in _PATHS:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, Path(value).absolute())
        object.__setattr__(self, "extras", tuple(self.extras))
        for name in ("tp", "pp", "cp", "dp", "rollouts", "steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise LabError(f"slime_instrument: lab option {name}: expected a whole number above 0, found {value!r}")

    @property
    def rollout_files(self) -> list[Path]:
        """The rollout dump of each rollout; none where samples are made up."""
        if self.rollout is None:
            return []
        numbers = range(self.rollouts)
        return [Path(str(self.rollout).replace("{rollout_id}", str(number))) for number in numbers]

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def custom_functions(self) -> dict[str, str]:
        """Dotted paths of functions among the overrides, by the override's name."""
        paths = {name: value for name, value in self.overrides.items() if name.endswith("_path")}
        return {name: path for name, path in paths.items() if isinstance(path, str) and _DOTTED.fullmatch(path)}

    @property
    def layout(self) -> dict[str, int]:
        return {"tp": self.tp, "pp": self.pp, "cp": self.cp, "dp": self.dp}

    def to_json(self) -> str:
        values = asdict(self)
        for name in _PATHS:
            if values[name] is not None:
                values[name] = str(values[name])
        return json.dumps(values)

    @classmethod
    def from_json(cls, text: str) -> LabOptions:
        known = {entry.name for entry in fields(cls)}
        return cls(**{key: value for key, value in json.loads(text).items() if key in known})


@dataclass(frozen=True)
class LabResult:
    """What a finished run left behind."""

    target: str
    """``slime`` or ``miniature``."""
    slime_version: str | None
    layout: dict[str, int]
    world: int
    seconds: dict[str, float]
    train_dumps: list[Path]
    rollout_dumps: list[Path]
    weights: list[Path]
    patches: list[dict[str, Any]]
    """Status records of rank 0 of the last pipeline stage, where the log-probs are."""
    logged_metrics: list[dict[str, Any]]
    """What was handed to the experiment tracker, in order."""
    custom_calls: dict[str, int] = field(default_factory=dict)
    """Calls, over all ranks, of each custom function named in ``overrides``, by the override's name."""
