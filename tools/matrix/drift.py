"""Things that upstream could do, or has done, to the places where the hooks work; each trained, not only read.

A variant is a checkout of slime in which a few lines are changed: the changed files are written anew, all others are
links into the checkout. What must come of it is one of the outcomes below; ``tests/drift`` holds each variant to it.
"""

from __future__ import annotations

import enum
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.matrix.plan import LAST_WITHOUT

MEGATRON = "slime/backends/megatron_utils"
DATA, ACTOR, LOSS, MODEL = "slime/utils/data.py", f"{MEGATRON}/actor.py", f"{MEGATRON}/loss.py", f"{MEGATRON}/model.py"
ITERATOR, METRICS, DUMP = (
    f"{MEGATRON}/data.py",
    "slime/observability/train_metric_utils.py",
    "slime/observability/train_data_utils.py",
)
OLD_DUMP = "slime/utils/train_dump_utils.py"

NATIVE = "main"


class Outcome(enum.Enum):
    """What comes of a variant. In every case training is untouched."""

    OURS = "the dump of the unchanged slime"
    BY_INDEX = "our dump, in the order of sample_index, without positions"
    NO_LOG_PROBS = "our dump without log-probs; it says why"
    NATIVE = "slime's own v2 dump; ours is not written"
    PER_RANK = "slime's own file per rank; ours is not written"


@dataclass(frozen=True)
class Edit:
    """In ``file``, every match of ``pattern`` becomes ``replacement``; there must be one. Only inside the definition
    of ``within`` where one is named. ``pattern`` None: the file is new and ``replacement`` its text."""

    file: str
    pattern: str | None
    replacement: str
    within: str | None = None


Step = Edit | Callable[[Path], None]


@dataclass(frozen=True)
class Variant:
    """``misfits``: patch -> what its reason must say. ``quick``: `make test` trains it as well."""

    what: str
    release: str
    steps: tuple[Step, ...]
    outcome: Outcome
    misfits: tuple[tuple[str, str], ...] = ()
    quick: bool = False

    @property
    def key(self) -> str:
        return f"{self.release}: {self.what}"

    def make(self, source: Path, folder: Path) -> Path:
        """Write the changed checkout into ``folder``."""
        shutil.copytree(
            source / "slime", folder / "slime", copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__")
        )
        for step in self.steps:
            _edit(folder, step) if isinstance(step, Edit) else step(folder)
        return folder


def _edit(folder: Path, edit: Edit) -> None:
    path = folder / edit.file
    if edit.pattern is None:
        _write(path, edit.replacement)
        return
    text = path.read_text(encoding="utf-8")
    start, end = _definition(text, edit.within) if edit.within else (0, len(text))
    changed, count = re.subn(edit.pattern, edit.replacement, text[start:end])
    if not count:
        raise ValueError(f"{edit.pattern} is not in {edit.file}")
    _write(path, text[:start] + changed + text[end:])


def _write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # a link into the checkout, which stays as it is
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _definition(text: str, name: str) -> tuple[int, int]:
    """Where the function or method ``name`` begins and ends: before the next line that is not indented deeper."""
    found = re.search(rf"^( *)def {name}\(", text, re.MULTILINE)
    if found is None:
        raise ValueError(f"there is no function {name}")
    # The closing bracket of the parameters stands as far left as the definition itself.
    after = re.compile(rf"^ {{0,{len(found[1])}}}[^\s)]", re.MULTILINE).search(text, found.end())
    return found.start(), after.start() if after else len(text)


def moved(name: str, origin: str, to: str, *, needs: str, left_behind: bool) -> Callable[[Path], None]:
    """The function goes from the file ``origin`` to the new file ``to``, which begins with the lines ``needs``.
    ``left_behind``: the old module still offers it."""

    def step(folder: Path) -> None:
        text = (folder / origin).read_text(encoding="utf-8")
        start, end = _definition(text, name)
        _write(folder / to, f"{needs}\n\n\n{text[start:end]}")
        shim = f"from {_module(to)} import {name}\n" if left_behind else ""
        _write(folder / origin, text[:start] + text[end:] + shim)

    return step


def renamed(origin: str, to: str, *, left_behind: bool) -> Callable[[Path], None]:
    """The module ``origin`` is ``to`` from now on. ``left_behind``: the old one still offers all its names."""

    def step(folder: Path) -> None:
        _write(folder / to, (folder / origin).read_text(encoding="utf-8"))
        (folder / origin).unlink()
        if left_behind:
            _write(folder / origin, f"from {_module(to)} import *\n")

    return step


def _module(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


_LOADER_CALL = r"process_rollout_data\(\s+self\.args,\s+rollout_data_ref,"
_RANKS = r"(?P<rest>\s+)(mpu\.get_data_parallel_rank[^\n]*?),(\s+)(mpu\.get_data_parallel_world_size[^\n]*?),"
_TRAINER_CALL = r"self\.train_actor\(rollout_id, rollout_data, external_data=external_data\)"
_TRAINER = r"def train_actor\(self, rollout_id: int, rollout_data: RolloutBatch, external_data=None\)"


def _without_args() -> tuple[Step, ...]:
    return (
        Edit(DATA, r"def process_rollout_data\(args, ", "def process_rollout_data("),
        Edit(ACTOR, _LOADER_CALL, "process_rollout_data(rollout_data_ref,"),
    )


def _loader_keywords() -> tuple[Step, ...]:
    return (
        Edit(DATA, r"def process_rollout_data\(", "def process_rollout_data(*, "),
        Edit(
            ACTOR,
            _LOADER_CALL + _RANKS,
            r"process_rollout_data(args=self.args, rollout_data_ref=rollout_data_ref, dp_rank=\2, dp_size=\4,",
        ),
    )


def _loader_moved(timer: str, *, left_behind: bool) -> tuple[Step, ...]:
    home = "slime/utils/rollout_loading.py"
    steps: tuple[Step, ...] = (
        moved(
            "process_rollout_data",
            DATA,
            home,
            needs=f"import ray\n\nfrom {timer} import Timer",
            left_behind=left_behind,
        ),
    )
    if not left_behind:
        steps += (
            Edit(
                ACTOR,
                "from slime.utils.data import process_rollout_data",
                f"from {_module(home)} import process_rollout_data",
            ),
        )
    return steps


def _loader_returns_a_tuple() -> tuple[Step, ...]:
    return (
        Edit(DATA, r"return rollout_data\n", "return rollout_data, {}\n", within="process_rollout_data"),
        Edit(ACTOR, r"rollout_data = process_rollout_data\(", "rollout_data, _ = process_rollout_data("),
    )


def _payloads() -> tuple[Step, ...]:
    transport = (
        "import pickle\n\n\n"
        "class TrainBatchRef:\n"
        "    def __init__(self, payload):\n"
        "        self.payload = pickle.dumps(payload)\n\n\n"
        "def unpack_rollout_payload(found):\n"
        "    return pickle.loads(found.payload) if isinstance(found, TrainBatchRef) else found\n"
    )
    return (
        Edit("slime/data/__init__.py", None, ""),
        Edit("slime/data/transport.py", None, transport),
        Edit("slime/ray/rollout.py", r"Box\(ray\.put\(rollout_data\)\)", "Box(ray.put(TrainBatchRef(rollout_data)))"),
        Edit(
            "slime/ray/rollout.py", r"(?m)^import ray\n", "import ray\nfrom slime.data.transport import TrainBatchRef\n"
        ),
        Edit(DATA, r"(?m)^import ray\n", "import ray\nfrom slime.data.transport import unpack_rollout_payload\n"),
        Edit(DATA, r"ray\.get\(([^\n]*)\)\n", r"unpack_rollout_payload(ray.get(\1))\n", within="process_rollout_data"),
    )


def _trainer(signature: str, call: str) -> tuple[Step, ...]:
    return (
        Edit(ACTOR, _TRAINER, f"def train_actor({signature})"),
        Edit(ACTOR, _TRAINER_CALL, f"self.train_actor({call})"),
    )


def _trainer_is_a_function(folder: Path) -> None:
    text = (folder / ACTOR).read_text(encoding="utf-8")
    start, end = _definition(text, "train_actor")
    body = "\n".join(line.removeprefix("    ") for line in text[start:end].split("\n"))
    rest = text[:start] + text[end:]
    rest = re.sub(_TRAINER_CALL, "train_actor(self, rollout_id, rollout_data, external_data=external_data)", rest)
    # The decorator of the next method stays where it is; this one has none.
    _write(folder / ACTOR, f"{rest}\n\n{body}")


def _get_next_is_a_function(folder: Path) -> None:
    text = (folder / ITERATOR).read_text(encoding="utf-8")
    start, end = _definition(text, "get_next")
    body = "\n".join(line.removeprefix("    ") for line in text[start:end].split("\n"))
    rest = re.sub(r"data_iterator\.get_next\(", "get_next(data_iterator, ", text[:start] + text[end:])
    _write(folder / ITERATOR, f"{rest}\n\n{body}")


def _metrics(release: str) -> str:
    return METRICS if release == NATIVE else ITERATOR


def _metrics_without_args(release: str) -> tuple[Step, ...]:
    return (
        Edit(_metrics(release), r"args: Namespace,\s+rollout_data", "rollout_data", within="log_rollout_data"),
        Edit(
            _metrics(release),
            r"\) -> None:\n",
            ") -> None:\n    import sys\n\n    args = sys.modules['slime.backends.megatron_utils.actor'].ARGS\n",
            within="log_rollout_data",
        ),
        Edit(
            ACTOR,
            r"(\n +)((?:train_metric_utils\.)?log_rollout_data\(\s+rollout_id,)\s+self\.args,",
            r"\1globals().update(ARGS=self.args)\1\2",
        ),
    )


def _step_renamed() -> tuple[Step, ...]:
    return (Edit(MODEL, r"\bstep_id\b", "number", within="train_one_step"),)


_POLICY_LOSS_CALL = r"func\(args, batch, logits, sum_of_sample_mean\)"


def _for_both() -> list[Variant]:
    variants = []
    for release in (NATIVE, LAST_WITHOUT):
        native = release == NATIVE
        timer = "slime.observability.timer" if native else "slime.utils.timer"
        stepped_back = Outcome.NATIVE if native else Outcome.PER_RANK
        dump = DUMP if native else OLD_DUMP
        renamed_dump = "slime/observability/train_debug_data.py"

        def add(
            what: str,
            steps: Sequence[Step],
            outcome: Outcome = Outcome.OURS,
            misfits: Sequence[tuple[str, str]] = (),
            quick: bool = False,
            release: str = release,
        ) -> None:
            variants.append(Variant(what, release, tuple(steps), outcome, tuple(misfits), quick))

        add("loader: `args` dropped", _without_args(), quick=True)
        add(
            "loader: `dp_rank` renamed",
            [Edit(DATA, r"\bdp_rank\b", "rank_of_data", within="process_rollout_data")],
        )
        add("loader: keywords only", _loader_keywords())
        add("loader: moved, still offered by the old module", _loader_moved(timer, left_behind=True))
        add(
            "loader: moved",
            _loader_moved(timer, left_behind=False),
            Outcome.OURS if native else Outcome.BY_INDEX,
            () if native else [("data-loader", "slime.utils.data has no process_rollout_data")],
        )
        add("loader: returns a tuple", _loader_returns_a_tuple())
        add("loader: `TrainBatchRef` payloads", _payloads(), Outcome.OURS if native else Outcome.BY_INDEX)
        add(
            "trainer: `rollout_id` renamed",
            [Edit(ACTOR, r"\brollout_id\b(?!=)", "number", within="train_actor")],
            stepped_back,
            [("train-actor", "expected also rollout_id")],
            quick=native,
        )
        add(
            "trainer: parameters reordered",
            _trainer(
                "self, rollout_data, rollout_id, external_data=None",
                "rollout_data, rollout_id, external_data=external_data",
            ),
        )
        add(
            "trainer: a parameter added, with a default",
            _trainer("self, rollout_id, rollout_data, external_data=None, phase='train'", "rollout_id, rollout_data"),
        )
        add(
            "trainer: a parameter added, without a default",
            _trainer("self, phase, rollout_id, rollout_data, external_data=None", "'train', rollout_id, rollout_data"),
        )
        add(
            "trainer: keywords only",
            _trainer(
                "self, *, rollout_id, rollout_data, external_data=None",
                "rollout_id=rollout_id, rollout_data=rollout_data",
            ),
        )
        add(
            "trainer: a function in place of the method",
            [_trainer_is_a_function],
            stepped_back,
            [("train-actor", "has no MegatronTrainRayActor.train_actor")],
        )
        module = dump.rsplit("/", 1)[1].removesuffix(".py")
        as_before = Edit(ACTOR, rf"\b{module}\.save_debug", "train_debug_data.save_debug")
        import_it = Edit(ACTOR, r"(?m)^import ray\n", "import ray\nfrom slime.observability import train_debug_data\n")
        old_import = (
            Edit(ACTOR, r"import train_data_utils, train_metric_utils", "import train_metric_utils")
            if native
            else Edit(ACTOR, r"(?m)^from slime\.utils import train_dump_utils\n", "")
        )
        add(
            "dump: its module renamed",
            [renamed(dump, renamed_dump, left_behind=False), as_before, import_it, old_import],
            stepped_back,
            [("train-dump", "none of its modules is imported")],
        )
        add(
            "dump: its module renamed, the old one still offers it",
            [renamed(dump, renamed_dump, left_behind=True), as_before, import_it, old_import],
        )
        add(
            "dump: `rollout_data` renamed",
            [
                Edit(
                    dump, r"rollout_id, rollout_data\):\n", "rollout_id, batch_data):\n    rollout_data = batch_data\n"
                ),
                Edit(ACTOR, r"(save_debug_train_data\([^\n]*)rollout_data=rollout_data", r"\1batch_data=rollout_data"),
            ],
            stepped_back,
            [("train-dump", "expected also rollout_data")],
        )
        add("metrics: `args` dropped", _metrics_without_args(release))
        add(
            "step: `step_id` renamed",
            _step_renamed(),
            Outcome.OURS,
            [("optimizer-step", "expected also step_id")],
        )
    return variants


def _of_the_capture() -> list[Variant]:
    """The places where log-probs are taken, at the last slime that does not take them itself."""

    def variant(
        what: str,
        steps: Sequence[Step],
        outcome: Outcome = Outcome.OURS,
        *misfits: tuple[str, str],
        quick: bool = False,
    ) -> Variant:
        return Variant(what, LAST_WITHOUT, tuple(steps), outcome, misfits, quick)

    lost = Outcome.NO_LOG_PROBS
    return [
        variant(
            "micro-batches: `keys` renamed",
            [Edit(ITERATOR, r"\bkeys\b", "wanted", within="get_next")],
            lost,
            ("micro-batches", "expected also keys"),
        ),
        variant(
            "micro-batches: a parameter added, with a default",
            [
                Edit(ITERATOR, r"def get_next\(self, ", "def get_next(self, *, peek=False, ", within="get_next"),
                Edit(ITERATOR, r"\.get_next\(keys\)", ".get_next(keys=keys)"),
                Edit(ACTOR, r"\.get_next\(\[", ".get_next(keys=["),
            ],
        ),
        variant(
            "micro-batches: a function in place of the method",
            [_get_next_is_a_function],
            lost,
            ("micro-batches", "has no DataIterator.get_next"),
        ),
        variant(
            "loss: `sum_of_sample_mean` renamed",
            [Edit(LOSS, r"\bsum_of_sample_mean\b", "reduce", within="policy_loss_function")],
        ),
        variant(
            "loss: parameters reordered",
            [
                Edit(
                    LOSS,
                    r"args: Namespace,\s+batch: RolloutBatch,",
                    "batch: RolloutBatch,\n    args: Namespace,",
                    within="policy_loss_function",
                ),
                Edit(LOSS, _POLICY_LOSS_CALL, "func(batch, args, logits, sum_of_sample_mean)"),
            ],
        ),
        variant(
            "loss: `batch` renamed",
            [Edit(LOSS, r"\bbatch\b", "micro_batch", within="policy_loss_function")],
            lost,
            ("policy-loss", "expected also batch"),
        ),
        variant(
            "log-probs: `unconcat_tokens` renamed",
            [
                Edit(LOSS, r"\bunconcat_tokens\b(?!\")", "tokens_of", within="get_log_probs_and_entropy"),
                Edit(LOSS, r"\bunconcat_tokens=batch", "tokens_of=batch", within="policy_loss_function"),
            ],
        ),
        variant(
            "log-probs: a list in place of the pair",
            [
                Edit(
                    LOSS,
                    r"\n    return ([^\n]+), res\n",
                    r"\n    return [\1, res]\n",
                    within="get_log_probs_and_entropy",
                )
            ],
        ),
        variant(
            "loss and log-probs: the module renamed, the old one still offers all",
            [renamed(LOSS, f"{MEGATRON}/losses.py", left_behind=True)],
            quick=True,
        ),
    ]


VARIANTS: tuple[Variant, ...] = (*_for_both(), *_of_the_capture())
