"""Training runs on disk: each is made once, whichever cells need it, and kept with what it answered."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import slime_instrument
from slime_instrument._format import journal
from slime_instrument.lab._options import LabError, LabResult
from slime_instrument.lab._training import train_all
from tools.matrix import plan
from tools.matrix.plan import Run

_BATCH = 40
_PACKAGE = Path(slime_instrument.__file__).resolve().parent
#: What only reads dumps. A run's result rests on all other code; runs of another state of it are made again only when
#: asked for, and the page says how many there are.
_READS_ONLY = ("_analysis", "_report", "_view", "_live", "_cli")


@dataclass(frozen=True)
class Outcome:
    """What a run left. ``error`` is the type and text of what it died of, on the rank that failed first."""

    folder: Path
    error: str | None
    patches: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    weights: dict[str, str]
    """SHA-256 over names and bytes of each rank's weights after the step."""
    code: str = ""

    @property
    def error_type(self) -> str:
        return (self.error or "").partition(":")[0]

    @property
    def train_dumps(self) -> list[Path]:
        """Whatever lies there, but for the journal of the run."""
        return sorted(path for path in (self.folder / "train_data").glob("*") if path.name != journal.NAME)

    @property
    def rollout_dump(self) -> Path:
        return self.folder / "rollout_data" / "0.pt"


class Runs:
    """The runs below ``root``, made on demand from ``sources``."""

    def __init__(
        self, root: Path, sources: dict[str, Path], core: Path | None, *, say: Callable[[str], None] = print
    ) -> None:
        self.root, self.sources, self.core, self.say = root, sources, core, say
        self.code = code_fingerprint()

    def get(self, run: Run) -> Outcome | None:
        """What ``run`` left; None if it was not made."""
        try:
            return Outcome(**{**json.loads(self._record(run).read_text()), "folder": self.root / run.folder})
        except (OSError, ValueError, TypeError):
            return None

    def forget(self, runs: Iterable[Run], *, only_changed: bool) -> None:
        """Drop ``runs``, or those of them that were made with other code than now."""
        for run in set(runs):
            found = self.get(run)
            if found is not None and not (only_changed and found.code == self.code):
                self._record(run).unlink()

    def make(self, runs: Iterable[Run]) -> None:
        """Make those that are not there yet: those that want one interpreter together."""
        missing = sorted({run for run in runs if self.get(run) is None}, key=_interpreter)
        for (release, instrumented), group in groupby(missing, key=_interpreter):
            wanted = list(group)
            for start in range(0, len(wanted), _BATCH):
                batch = wanted[start : start + _BATCH]
                self.say(f"{release} {'with' if instrumented else 'without'} us: {len(batch)} run(s)")
                self._train(batch)

    def _train(self, batch: list[Run]) -> None:
        for run in batch:
            shutil.rmtree(self.root / run.folder, ignore_errors=True)
        wanted = [plan.options(run, self.root, self._source(run.release), self.core) for run in batch]
        for run, outcome in zip(batch, train_all(wanted), strict=True):
            record = self._record(run)
            record.parent.mkdir(parents=True, exist_ok=True)
            part = record.with_suffix(".part")
            part.write_text(json.dumps({**_describe(outcome, self.root / run.folder), "code": self.code}, default=str))
            part.replace(record)

    def _source(self, release: str) -> Path | None:
        # Without this, a release that is not there would be trained as the miniature.
        if release != plan.MINIATURE and release not in self.sources:
            raise LookupError(f"there is no checkout of {release}")
        return self.sources.get(release)

    def _record(self, run: Run) -> Path:
        return self.root / run.folder / "outcome.json"


def code_fingerprint() -> str:
    """Of the parts of the package that a run's result depends on: what they do, whatever their comments say."""
    digest = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path.relative_to(_PACKAGE).parts[0] not in _READS_ONLY:
            digest.update(_without_prose(path.read_text()).encode())
    return digest.hexdigest()[:12]


def _without_prose(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # a text that stands alone, of a function or below an attribute, does nothing
            node.body = [each for each in body if not _is_text(each)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _interpreter(run: Run) -> tuple[str, bool]:
    return run.release, run.instrumented


def _describe(outcome: LabResult | LabError, folder: Path) -> dict[str, Any]:
    if isinstance(outcome, LabError):
        return {"error": _cause(outcome), "patches": [], "metrics": [], "weights": {}}
    weights = {path.stem: weights_digest(path) for path in outcome.weights}
    shutil.rmtree(folder / "weights", ignore_errors=True)
    return {"error": None, "patches": outcome.patches, "metrics": outcome.logged_metrics, "weights": weights}


def _cause(error: LabError) -> str:
    """The exception's own line of the traceback that came first, with where in slime it was raised."""
    first = next(iter(error.tracebacks.values()), str(error)).strip().splitlines()
    return first[-1] if first else str(error)


def weights_digest(path: Path) -> str:
    """SHA-256 over names and bytes of one rank's saved weights."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in torch.load(path, weights_only=True).items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
