"""``docs/compatibility.md`` from the results: tables of what was verified, and in words what that means."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_instrument._installation import installed
from slime_instrument.lab._samples import EDGE_KINDS
from slime_instrument.lab._sources import source_version
from tools.matrix.drift import NATIVE, VARIANTS
from tools.matrix.layouts import LAYOUTS, RECIPE_LAYOUTS
from tools.matrix.plan import AROUND_NATIVE, LAST_WITHOUT, MINIATURE, RELEASES, Cell, cells
from tools.matrix.recipes import RECIPES

_DRIFT = """## When slime changes

What happens to the dump when upstream changes a function that is patched, as it could or already has. Each change was
made to a few lines of a checkout, which was then trained on DP2-CP2 (`tools/matrix/drift.py`, `tests/drift`). The
weights are those of the unchanged slime, bit for bit; the file was compared value by value with what the table says;
and `check` predicted the outcome. –: not tried with this slime.

"""

_FORKS = """## Forks

Public repositories that contain the package `slime`, at the given commits. They are not part of the matrix: each was
trained once, by hand, on DP2-CP2 with the plainest recipe, instrumented and not. `check` says that dumps will be
written for all but the two older than v0.2.0.

- "of": the month of the commit.
- "own changes": lines added and removed in `slime/` since the last upstream commit that the fork contains.
- "ok": every patch was active except the driver's, which these runs do not use; 8 samples were in rollout order with
  captured log-probs; the weights were those of the uninstrumented run, bit for bit.

"""
_TRAINED_FORKS = (
    ("RLsys-Foundation/APRIL", "a72b585", "2025-09", "0.0.1", "not counted", "older than v0.2.0: `check` exits 1"),
    ("dzorlu/slime", "e7c18a0", "2025-11", "0.1.0", "+4932 −2088", "not here: older than what the lab trains"),
    ("SeeleAI/seele-slime", "7ff8c77", "2025-11", "0.0.1", "not counted", "older than v0.2.0: `check` exits 1"),
    ("Dodojordi/slime", "7ade54a", "2025-12", "0.2.0.post1", "none", "ok, with megatron-core 0.14.0"),
    ("guapisolo/slime_", "0644397", "2025-12", "0.2.1", "none", "ok"),
    ("kekmodel/slime", "2cd4130", "2026-01", "0.2.2", "+1909 −829", "ok"),
    ("Osmosis-AI/slime-rl", "2048555b", "2026-04", "0.2.3", "+4935 −4157", "ok"),
    ("kaysonyu/slime", "9b50665", "2026-04", "0.2.4", "none", "ok"),
    ("L-hongbin/slime-kernel-agent", "24a85e4", "2026-05", "0.2.4", "+1049 −32", "ok"),
    ("langtech-bsc/slime", "661d078", "2026-07", "0.3.0", "+2247 −191", "not here: asks for an argument the lab lacks"),
    ("modal-projects/slime", "680824d", "2026-07", "0.3.0", "none", "ok"),
)
_RENAMED = """
A fork that renamed the package is patched with `SLIME_INSTRUMENT_PACKAGE=NAME`, if its modules are slime's. This was
checked with slime 681b3adca~1 renamed to `vime` (`tests/real_slime/test_renamed_package.py`): dump and weights are
those of the original, bit for bit. vime itself was not available and was not run.
"""

Found = Mapping[str, Mapping[str, Any]]

_WORDS = {"ok": "ok", "failed": "**failed**", "absent": "–", "not run": "not run"}
_TARGETS = (*RELEASES, MINIATURE)
_UNEVEN = "uneven data-parallel ranks"
_COUNTED = {
    "ok": "ok",
    "failed": "failed",
    "slime-cannot": "that slime cannot train",
    "absent": "that the release does not have",
    "not run": "not run",
}

_INTRO = """# Compatibility

Written by `python -m tools.matrix --page`, not by hand. Every cell is real training on CPU ranks: instrumented,
uninstrumented, and in a single process, compared value by value. Layouts name the parallel sizes above 1, such as
DP2-CP2 (VPP: virtual pipeline). `681b3adca` is slime's commit with the v2 dump of pull request #2266, `681b3adca~1` the
one before it, and `miniature` the bundled stand-in for slime.

| in a cell | means |
|---|---|
| ok | every [check](#what-is-verified-in-each-cell) passed |
| **failed** | a check failed; the reason is listed below |
| slime: *error* | slime cannot train this at this release: it ends with this error, instrumented or not |
| – | this release does not have it |
| not run | not run yet |
"""

_VERIFIED = """## What is verified in each cell

- **Same as a single process.** The dump is compared, sample by sample, with that of one process: log-probs within 1e-5
  (1e-4 for mixture of experts and for values captured after an optimizer step; 0.15 in bf16), what is computed from
  several log-probs within five times that, everything else exactly. Whitened advantages are left out, because slime's
  own depend on the layout.
- **Same as slime's own file.** The dump is compared with that of the uninstrumented run. At releases without the v2
  dump, every value in slime's per-rank files is found in ours, bit for bit, at the place where a plain count of the
  tokens puts it. At releases with it, the two files are equal bit for bit, except for the provenance.
- **Same as native slime.** Instrumented `681b3adca~1` against uninstrumented `681b3adca`: the whole file is equal bit
  for bit, except for the provenance.
- **Captured equals recomputed.** On the plainest recipe, log-probs captured in the training forward are equal, bit for
  bit, to those that slime computes beforehand when a recipe asks for it.
- **Weights unchanged.** After the step, the weights of every rank are those of the uninstrumented run, bit for bit.
- **Metrics unchanged.** The experiment tracker gets what slime logs uninstrumented, bit for bit, except for timings. No
  key of ours is among it, nor slime's own stray `rollout/partition`.
- **The rest.** There is one file and no other; `validate` passes against the rollout dump; each position leads to the
  rollout sample with the same tokens; log-probs are complete; the provenance says where they and the positions came
  from; no patch failed.

[Two differences](../README.md#what-you-get) from slime's file are deliberate.
"""

_LIMITS = """## What was not possible on a CPU

NCCL, CUDA tensors and streams, TransformerEngine and flash attention, loading a checkpoint, weight sync, SGLang,
slime's own argument parser, training a critic, Megatron-based teachers, FSDP. Packed attention, images and the
routing-replay hooks of a patched Megatron-LM are replaced by stand-ins. Models and batches are tiny; for what a dump
costs, see [Performance](performance.md).
"""


def render(results: Found, sources: Mapping[str, Path], code: str) -> str:
    """The whole page. ``code``: fingerprint of the code that is there now."""
    parts = [
        _INTRO,
        _versions(results, sources, code),
        "## Releases and layouts\n\nThe plainest recipe: GRPO, one optimizer step.\n",
        _layouts(results),
        _recipes(results, RECIPE_LAYOUTS[0], _TARGETS),
        _recipes(results, RECIPE_LAYOUTS[1], AROUND_NATIVE),
        _samples(results),
        _VERIFIED,
        _figures(results),
        _notes(results),
        _LIMITS,
        forks_section(),
        drift_section(),
    ]
    return "\n".join(part for part in parts if part)


def forks_section() -> str:
    """What came of each fork that was tried."""
    heads = ("repository", "commit", "of", "version", "own changes", "trained")
    return _FORKS + _table(heads, _TRAINED_FORKS) + _RENAMED


def drift_section() -> str:
    """What must come of each changed slime; ``tests/drift`` trains them and holds them to it."""
    columns = (NATIVE, LAST_WITHOUT)
    outcomes = {(variant.what, variant.release): variant.outcome.value for variant in VARIANTS}
    rows = [
        [what, *(outcomes.get((what, release), "–") for release in columns)]
        for what in dict.fromkeys(variant.what for variant in VARIANTS)
    ]
    return _DRIFT + _table(["changed", *columns], rows)


def _cell(results: Found, cell: Cell) -> str:
    found = results.get(cell.key)
    if found is None:
        return _WORDS["not run"]
    if found["status"] == "slime-cannot":
        return f"slime: {_error_type(found['reason'])}"
    return _WORDS[found["status"]]


def _error_type(reason: str | None) -> str:
    return (reason or "").partition(":")[0]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _layouts(results: Found) -> str:
    rows = [
        [layout.name, *(_cell(results, Cell(release, layout.name, "grpo", "default")) for release in _TARGETS)]
        for layout in LAYOUTS.values()
        if layout.listed
    ]
    return _table(["layout", *_TARGETS], rows)


def _recipes(results: Found, layout: str, releases: Sequence[str]) -> str:
    rows = [
        [recipe.title, *(_cell(results, Cell(release, layout, recipe.name, recipe.samples)) for release in releases)]
        for recipe in RECIPES.values()
    ]
    return f"## Recipes on {layout}\n\n" + _table(["recipe", *releases], rows)


def _samples(results: Found) -> str:
    """One row per kind: the runs that hold it, together."""
    rows = []
    for kind, what in EDGE_KINDS.items():
        name = f"edge:{kind}" if kind == "no-prompt" else "edge"
        rows.append([what, *(_kind(results, release, name, kind) for release in _TARGETS)])
    rows.append([_UNEVEN, *(_kind(results, release, "uneven", None) for release in _TARGETS)])
    where = f"a single process, {' and '.join(RECIPE_LAYOUTS)}"
    alone = f'"{EDGE_KINDS["no-prompt"]}" and "{_UNEVEN}"'
    intro = f"## Samples\n\nOn {where}. {alone} have a run each; all other kinds are in one run.\n\n"
    return intro + _table(["samples", *_TARGETS], rows)


def _kind(results: Found, release: str, samples: str, kind: str | None) -> str:
    shown = []
    for layout in ("single", *RECIPE_LAYOUTS):
        found = _cell(results, Cell(release, layout, "grpo", samples))
        if found.startswith("slime:") and kind is not None:
            # The set was taken apart: what became of this kind alone?
            alone = _cell(results, Cell(release, layout, "grpo", f"edge:{kind}"))
            found = found if alone == _WORDS["not run"] else alone
        shown.append((layout, found))
    values = {found for _, found in shown}
    if len(values) == 1:
        return values.pop()
    return "; ".join(f"{layout} {found}" for layout, found in shown)


def _figures(results: Found) -> str:
    """The largest difference of a log-prob from the single process, by layout, over the float32 recipes."""
    largest: dict[str, float] = {}
    for key, found in results.items():
        release, layout, recipe, _ = key.split(" / ")
        value = found["figures"].get("log_probs")
        if value is not None and release != MINIATURE and RECIPES[recipe].tolerance <= 1e-5:
            largest[layout] = max(largest.get(layout, 0.0), value)
    rows = [[layout, f"{value:.1e}"] for layout, value in sorted(largest.items())]
    return "Largest difference of a log-prob from the single process, over all releases:\n\n" + _table(
        ["layout", "difference"], rows
    )


def _notes(results: Found) -> str:
    lines = []
    for status, title in (("failed", "Failed"), ("slime-cannot", "What slime itself cannot train")):
        chosen = {key: found for key, found in results.items() if found["status"] == status}
        if not chosen:
            continue
        grouped: dict[str, list[str]] = {}
        for key, found in chosen.items():
            grouped.setdefault(_one_line(found["reason"]), []).append(key)
        lines.append(f"## {title}\n\nCells as release / layout / recipe / samples.\n")
        lines += [f"- {_shortened(keys)}: `{reason}`" for reason, keys in sorted(grouped.items())]
        lines.append("")
    return "\n".join(lines)


def _one_line(reason: str | None) -> str:
    text = " ".join((reason or "no reason").split()).replace("`", "'")
    return text if len(text) <= 160 else text[:157] + "..."


def _shortened(keys: Sequence[str]) -> str:
    return ", ".join(sorted(keys)) if len(keys) <= 6 else ", ".join(sorted(keys)[:5]) + f" and {len(keys) - 5} more"


def _versions(results: Found, sources: Mapping[str, Path], code: str) -> str:
    planned = {cell.key for cell in cells(_TARGETS)}
    counts = Counter(results[key]["status"] if key in results else "not run" for key in planned)
    counted = ", ".join(f"{counts[status]} {words}" for status, words in _COUNTED.items() if counts[status])
    dates = sorted(found["when"][:10] for found in results.values())
    other = sum(found["code"] != code for found in results.values())
    rows = [
        ["cells", f"{len(planned)} planned: {counted}"],
        ["run on", f"{dates[0]} to {dates[-1]}" if dates else "nothing run"],
        ["run with other code than now", f"{other} of {len(results)} cells"],
        ["Python, torch", f"{platform.python_version()}, {installed('torch')}"],
        ["megatron-core", f"{installed('megatron-core')}; 0.14.0 for v0.2.0 and v0.2.1"],
        [
            "slime",
            ", ".join(f"{release} ({source_version(sources[release])})" for release in RELEASES if release in sources),
        ],
    ]
    if "main" in sources:
        rows.append(["main", f"checkout {sources['main'].name}"])
    return _table(["", ""], rows)
