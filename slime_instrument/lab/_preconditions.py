"""What cannot work is refused before anything is started, in one message.

torch is imported only to read a rollout dump.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

from slime_instrument._errors import five_parts
from slime_instrument.lab._arguments import DEFAULTS, LAYOUT_ARGUMENTS, model_arguments
from slime_instrument.lab._checkpoint import Checkpoint
from slime_instrument.lab._extras import EXTRAS
from slime_instrument.lab._faults import parse_fault
from slime_instrument.lab._options import LabError, LabOptions
from slime_instrument.lab._rollout import Rollout
from slime_instrument.lab._rollout import refused as rollout_refused
from slime_instrument.lab._samples import batch_size, edge_kinds
from slime_instrument.lab._sources import MINIATURE, is_source

_FOLLOWS = "Nothing was trained."
_OLD_CORE = "0.14"
_READ = re.compile(r"\bargs\.([A-Za-z_]\w*)")
_READ_BY_NAME = re.compile(r"""attr\(\s*[\w.]*args,\s*["'](\w+)["']""")
_DECLARED = re.compile(r"""["']--([\w-]+)["']""")
_CONFIGURED = re.compile(r"^    (\w+):", re.MULTILINE)


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
        raise _refused("lab", "megatron-core", "no such package", "Install slime-instrument[lab].")
    edge_kinds(options.samples)
    for name in options.extras:
        if name not in EXTRAS:
            raise _refused("lab extras", f"names among {', '.join(EXTRAS)}", repr(name), "Choose among these.")
    parse_fault(options.fault)
    if options.slime is not None and needs_old_core(options.slime) and options.core is None:
        found = importlib.metadata.version("megatron-core")
        if not found.startswith(_OLD_CORE):
            raise _refused(
                f"slime in {options.slime}",
                f"megatron-core {_OLD_CORE}, for which this release was made",
                found,
                f"Run pip install --no-deps --target DIR megatron-core=={_OLD_CORE}.0, and set SLIME_OLD_CORE=DIR.",
            )
    _check_overrides(options)
    checkpoint = _checkpoint(options)
    values = {**DEFAULTS, **model_arguments(checkpoint), **options.overrides}
    _check_layout(options, values)
    if options.rollout is not None:
        _check_rollouts(options, values)
    else:
        _check_batch(options, values)


def _checkpoint(options: LabOptions) -> Checkpoint | None:
    """The checkpoint of the run, once it is known that its tensors are there and that nothing contradicts it."""
    if options.checkpoint is None:
        if options.export_checkpoint is not None:
            raise _refused(
                "lab export_checkpoint", "a checkpoint to be trained", "none", "Set checkpoint=DIR, or save_weights."
            )
        return None
    found = Checkpoint.read(options.checkpoint)
    found.check_tensors()
    if options.export_checkpoint == options.checkpoint:
        raise _refused(
            "lab export_checkpoint", "a folder other than the checkpoint's", str(options.checkpoint), "Name another."
        )
    for name in options.overrides:
        if name in found.arguments:
            raise _refused(
                f"lab override {name}",
                f"{found.arguments[name]}, as the checkpoint in {options.checkpoint} has it",
                repr(options.overrides[name]),
                "Leave it out.",
            )
    if options.overrides.get("allgather_cp") and options.cp > 1:
        raise _refused(
            "lab override allgather_cp",
            "zigzag context parallelism, for which Megatron-Core's rotary positions are made",
            "True",
            "Leave it out, or set cp=1.",
        )
    return found


def needs_old_core(slime: Path) -> bool:
    """Whether this checkout calls Megatron-Core in a way that later releases of it refuse: v0.2.0 and v0.2.1."""
    try:
        text = (slime / "slime" / "backends" / "megatron_utils" / "model.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^\s+no_wd_decay_cond\s*:", text, re.MULTILINE) is not None


def _check_overrides(options: LabOptions) -> None:
    for name in options.overrides:
        if name in LAYOUT_ARGUMENTS:
            raise _refused(
                "lab overrides", "sizes by the options tp, pp, cp and dp", name, "Use these options instead."
            )
    unknown = [name for name in options.overrides if options.slime is None or name not in DEFAULTS]
    known = _names_read(options.slime, options.core) if unknown else frozenset()
    for name in unknown:
        if name not in known:
            target = "the bundled miniature" if options.slime is None else f"slime in {options.slime}"
            raise _refused(
                f"lab override {name}",
                f"an argument that {target} reads",
                "nothing there that reads it",
                "Correct the name"
                + (", or train real slime: slime=DIR with a checkout." if options.slime is None else "."),
            )


@functools.cache
def _names_read(slime: Path | None, core: Path | None) -> frozenset[str]:
    """Names of arguments that the target's sources read, and those that configure Megatron-Core."""
    lab = Path(__file__).parent
    folders = [slime / "slime" if slime else MINIATURE, lab / "stubs"]
    files = [path for folder in folders for path in folder.rglob("*.py")] + list(lab.glob("_*.py"))
    names: set[str] = set()
    for path in files:
        text = path.read_text(encoding="utf-8", errors="replace")
        names.update(_READ.findall(text), _READ_BY_NAME.findall(text))
        if path.name == "arguments.py":
            names.update(name.replace("-", "_") for name in _DECLARED.findall(text))
    spec = None if core else importlib.util.find_spec("megatron")
    places = [str(core / "megatron")] if core else (spec and spec.submodule_search_locations) or []
    for place in places:
        for path in Path(place, "core").rglob("*_config.py"):
            names.update(_CONFIGURED.findall(path.read_text(encoding="utf-8", errors="replace")))
    return frozenset(names)


def _check_layout(options: LabOptions, values: dict[str, Any]) -> None:
    for name, size, of, what in (
        ("tp", options.tp, values["num_query_groups"], "query groups"),
        ("tp", options.tp, values["padded_vocab_size"], "tokens of vocabulary"),
        ("pp", options.pp, values["num_layers"], "layers"),
    ):
        if of % size:
            raise _refused(f"lab layout {name}={size}", f"a divisor of the model's {of} {what}", str(size), _fewer(of))


def _check_rollouts(options: LabOptions, values: dict[str, Any]) -> None:
    """Whether each rollout dump can be trained, in place of the lab's own samples, and by this layout."""
    for name, unwanted in (
        ("samples", options.samples != "default"),
        ("extras", bool(options.extras)),
        ("rollout_log_probs", options.rollout_log_probs is not None),
        ("fault", (options.fault or "").partition(":")[0] == "sample-swap"),
    ):
        if unwanted:
            raise _refused(
                f"lab option {name}", "none beside a rollout dump, which is trained as it is",
                repr(getattr(options, name)), "Leave it out, or leave out rollout.",
            )  # fmt: skip
    for name in ("rollout_batch_size", "n_samples_per_prompt", "global_batch_size"):
        if name in options.overrides:
            raise _refused(
                f"lab override {name}", "what the rollout dump has", repr(options.overrides[name]), "Leave it out."
            )
    files = options.rollout_files
    if len(set(files)) < len(files):
        raise _refused(
            "lab rollout", f"{{rollout_id}} in the path, for {len(files)} rollouts", str(options.rollout), "Put it in."
        )
    rollouts = [Rollout.read(path) for path in files]
    sizes = [(one.n_samples, one.n_rollouts, one.group_size) for one in rollouts]
    for one, size in zip(rollouts, sizes, strict=True):
        one.check_vocabulary(values["vocab_size"])
        if size != sizes[0]:
            raise rollout_refused(
                one.path, f"{sizes[0][0]} samples in groups of the same size, as in {files[0].name}",
                str(size[0]), "Train it in a run of its own.",
            )  # fmt: skip
    _check_division(options, values, rollouts[0].n_rollouts, rollouts[0].n_samples)


def _check_batch(options: LabOptions, values: dict[str, Any]) -> None:
    count = values["rollout_batch_size"] * values["n_samples_per_prompt"]
    _check_division(
        options,
        values,
        batch_size(options.samples, count, in_rollouts=True),
        batch_size(options.samples, count, in_rollouts=False),
    )


def _check_division(options: LabOptions, values: dict[str, Any], rollouts: int, samples: int) -> None:
    if rollouts % options.steps:
        raise _refused(
            f"lab steps={options.steps}", f"a divisor of the {rollouts} rollouts", str(options.steps), _fewer(rollouts)
        )
    per_step = samples // options.steps
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
