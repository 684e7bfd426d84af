"""What cannot work is refused before anything is started, in one message; torch is not imported for it."""

from __future__ import annotations

import importlib.util
from typing import Any

from slime_instrument._errors import five_parts
from slime_instrument.lab._arguments import DEFAULTS
from slime_instrument.lab._extras import EXTRAS
from slime_instrument.lab._options import LabError, LabOptions
from slime_instrument.lab._samples import batch_size, edge_kinds
from slime_instrument.lab._sources import is_source

_FOLLOWS = "Nothing was trained."


def check(options: LabOptions) -> None:
    """Raise :class:`LabError` if this run cannot start."""
    if options.slime is not None and not is_source(options.slime):
        raise _refused(
            "lab source",
            "a slime checkout (a folder with slime/ in it)",
            str(options.slime),
            "Point --slime or SLIME_SOURCE at a checkout, or leave both out to train the miniature.",
        )
    if options.core is None and importlib.util.find_spec("megatron") is None:
        raise _refused("lab", "megatron-core", "no such package", "Install it: pip install 'slime-instrument[lab]'.")
    edge_kinds(options.samples)
    for name in options.extras:
        if name not in EXTRAS:
            raise _refused("lab extras", f"names among {', '.join(EXTRAS)}", repr(name), "Choose among these.")
    _check_sizes(options)


def _check_sizes(options: LabOptions) -> None:
    values: dict[str, Any] = {**DEFAULTS, **options.overrides}
    for name, size, of, what in (
        ("tp", options.tp, values["num_query_groups"], "query groups"),
        ("pp", options.pp, values["num_layers"], "layers"),
    ):
        if of % size:
            raise _refused(f"lab layout {name}={size}", f"a divisor of the model's {of} {what}", str(size), _fewer(of))
    count = values["rollout_batch_size"] * values["n_samples_per_prompt"]
    rollouts = batch_size(options.samples, count, in_rollouts=True)
    if rollouts % options.steps:
        raise _refused(
            f"lab steps={options.steps}", f"a divisor of the {rollouts} rollouts", str(options.steps), "Use 1 or 2."
        )
    per_step = batch_size(options.samples, count, in_rollouts=False) // options.steps
    share = options.dp * values["micro_batch_size"]
    if not values["use_dynamic_batch_size"] and per_step % share:
        raise _refused(
            f"lab layout dp={options.dp}",
            f"data-parallel ranks times samples per micro-batch to divide the step's {per_step} samples",
            str(share),
            _fewer(per_step // values["micro_batch_size"]),
        )


def _fewer(of: int) -> str:
    return f"Use one of {', '.join(str(size) for size in range(1, of + 1) if of % size == 0)}."


def _refused(subject: str, expected: str, found: str, next_step: str) -> LabError:
    return LabError(five_parts(subject, expected=expected, found=found, follows=_FOLLOWS, next_step=next_step))
