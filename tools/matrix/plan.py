"""Which cells of release x layout x recipe x samples are run, and which training runs they are made of.

The rule: every release with every layout, on the plainest recipe; every recipe on one layout at every release, and on
a second one at the releases around the native dump; all sample kinds in one run, on a single process and on the two
layouts of the recipes, at every release; a response without a prompt and uneven ranks likewise, in runs of their own.
What a release does not have is a cell of its own kind, as is what slime itself cannot train.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slime_instrument.lab._options import LabOptions
from slime_instrument.lab._sources import find_sources
from tools.matrix.layouts import LAYOUTS, RECIPE_LAYOUTS, Layout
from tools.matrix.recipes import RECIPES, Recipe

#: Oldest first. A checkout whose folder name starts with ``main`` counts as the last one.
RELEASES = (
    *("v0.2.0", "v0.2.1", "v0.2.2", "v0.2.3", "v0.2.4", "v0.3.0", "v0.3.1"),
    *("681b3adca~1", "681b3adca", "main"),
)
MINIATURE = "miniature"
#: The release without the native dump that has one right behind it: the same run there is compared bit for bit.
LAST_WITHOUT, FIRST_NATIVE = "681b3adca~1", "681b3adca"
#: Where recipes run on both of their layouts.
AROUND_NATIVE = (LAST_WITHOUT, FIRST_NATIVE, "main")
#: Releases that were made for an older megatron-core.
OLD_CORE = ("v0.2.0", "v0.2.1")
UNEVEN = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 48}


@dataclass(frozen=True, order=True)
class Run:
    """One training run."""

    release: str
    layout: str
    recipe: str
    samples: str
    instrumented: bool

    @property
    def folder(self) -> Path:
        armed = "with" if self.instrumented else "without"
        return Path(self.release, self.layout, self.recipe, self.samples.replace(":", "="), armed)


@dataclass(frozen=True, order=True)
class Cell:
    """One comparison. Its identity is what the results file is keyed by."""

    release: str
    layout: str
    recipe: str
    samples: str

    @property
    def key(self) -> str:
        return " / ".join((self.release, self.layout, self.recipe, self.samples))

    def run(self, *, instrumented: bool, release: str | None = None, layout: str | None = None) -> Run:
        return Run(release or self.release, layout or self.layout, self.recipe, self.samples, instrumented)

    @property
    def subject(self) -> Run:
        return self.run(instrumented=True)

    @property
    def plain(self) -> Run:
        """The same without us."""
        return self.run(instrumented=False)

    @property
    def single(self) -> Run | None:
        """The same in one process; None where it is one."""
        reference = LAYOUTS[self.layout].reference
        return None if reference == self.layout else self.run(instrumented=True, layout=reference)

    @property
    def single_plain(self) -> Run | None:
        """Whether slime itself can train this in one process."""
        single = self.single
        return None if single is None else Run(single.release, single.layout, single.recipe, single.samples, False)

    @property
    def native(self) -> Run | None:
        """The same at the release that dumps natively, where what it dumps can be compared bit for bit."""
        return self.run(instrumented=False, release=FIRST_NATIVE) if self.release == LAST_WITHOUT else None

    @property
    def recomputed(self) -> Run | None:
        """The same run made to compute its log-probs beforehand; what was captured must be the same numbers."""
        plainest = self.recipe == "grpo" and self.samples == "default" and self.layout in RECIPE_LAYOUTS
        if not plainest or self.release == MINIATURE:
            return None
        return Run(self.release, self.layout, "mismatch", "default", False)

    @property
    def runs(self) -> list[Run]:
        runs = [self.subject, self.plain, self.single, self.native, self.recomputed]
        if "no-prompt" in self.samples:
            # slime trains this on several ranks and not on one; whether it does is asked of it alone.
            runs.append(self.single_plain)
        return [run for run in runs if run is not None]


def cells(releases: Iterable[str]) -> Iterator[Cell]:
    """Every cell of the pruned matrix."""
    for release in releases:
        for layout in LAYOUTS.values():
            if layout.listed:
                yield Cell(release, layout.name, "grpo", "default")
        for recipe in RECIPES.values():
            if recipe.name == "grpo":
                continue
            for name in RECIPE_LAYOUTS if release in AROUND_NATIVE else RECIPE_LAYOUTS[:1]:
                yield Cell(release, name, recipe.name, recipe.samples)
        for samples in ("edge", "edge:no-prompt", "uneven"):
            for name in ("single", *RECIPE_LAYOUTS):
                yield Cell(release, name, "grpo", samples)


def absent(cell: Cell, source: Path | None) -> str | None:
    """Why this release has no such cell, or None."""
    layout, recipe = LAYOUTS[cell.layout], RECIPES[cell.recipe]
    if cell.release == MINIATURE or source is None:
        return None
    if layout.needs is not None and not _mentions(source, layout.needs):
        return f"no {layout.needs} at this release"
    place = RELEASES.index(cell.release)
    if place < RELEASES.index(recipe.since):
        return f"came with {recipe.since}"
    if recipe.until is not None and place > RELEASES.index(recipe.until):
        return f"gone after {recipe.until}"
    return None


def options(run: Run, root: Path, source: Path | None, core: Path | None) -> LabOptions:
    """The lab's options for ``run``, below ``root``."""
    layout: Layout = LAYOUTS[run.layout]
    recipe: Recipe = RECIPES[run.recipe]
    overrides = {**recipe.overrides, **layout.overrides, **(UNEVEN if run.samples == "uneven" else {})}
    return LabOptions(
        out=root / run.folder,
        slime=source,
        core=core if run.release in OLD_CORE else None,
        tp=layout.tp,
        pp=layout.pp,
        cp=layout.cp,
        dp=layout.dp,
        steps=recipe.steps,
        with_ref=recipe.with_ref,
        extras=recipe.extras,
        samples=run.samples,
        overrides=overrides,
        instrumented=run.instrumented,
        save_weights=True,
        timeout=120.0,
    )


def checkouts() -> dict[str, Path]:
    """Release -> checkout on this machine, by folder name."""
    found: dict[str, Path] = {}
    for source in find_sources():
        release = "main" if source.name.startswith("main") else source.name
        if release in RELEASES:
            found.setdefault(release, source)
    return found


@functools.cache
def _mentions(source: Path, word: str) -> bool:
    folder = source / "slime" / "backends" / "megatron_utils"
    return any(word in path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
