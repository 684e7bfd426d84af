"""The HTML file: template, style, scripts and data in one, and the numbers behind its charts.

Nothing from a dump ever becomes markup or script.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from slime_instrument import __version__
from slime_instrument._analysis.corrections import PRESETS, Sweep, label
from slime_instrument._analysis.statistics import percentiles
from slime_instrument._analysis.table import TOKEN_KINDS, TokenTable
from slime_instrument._analysis.verdict import LEVELS
from slime_instrument._analysis.what_if import WhatIf
from slime_instrument._report.answers import Answers
from slime_instrument._report.samples import Block

MARKS = {"ok": "✓", "unexplained": "!", "fault": "✕", "nothing-compared": "?"}
_SCRIPTS = ("data", "charts", "table", "sample", "main")
_SOURCE_MAP = re.compile(r"(?://|/\*)# sourceMappingURL=\S+(?:\s*\*/)?")


def json_in_html(value: Any) -> str:
    """JSON that can stand in a script element: no character in it can end the element or begin markup."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class Page:
    """Everything of the file that is the same in every report, and how the rest is put into it."""

    def __init__(self) -> None:
        static = resources.files("slime_instrument._report") / "static"

        def text(name: str) -> str:
            return _SOURCE_MAP.sub("", (static / name).read_text(encoding="utf-8")).strip()

        self._template = text("page.html.j2")
        self._css, self._vendor_css = text("style.css"), text("vendor/tabulator.min.css")
        own = "(() => {\n" + "\n".join(text(f"js/{name}.js") for name in _SCRIPTS) + "\n})();"
        self._scripts = [text("vendor/echarts.min.js"), text("vendor/tabulator.min.js"), own]
        self.base_size = sum(map(len, (self._template, self._css, self._vendor_css, *self._scripts)))

    def write(
        self,
        out: Path,
        *,
        overall: Answers,
        rollouts: Sequence[dict[str, Any]],
        tables: Sequence[str],
        blocks: Sequence[Block],
        words: str | None,
        columns: Sequence[str],
        skipped: Sequence[dict[str, str]],
        left_out: Sequence[str],
        sweep: dict[str, Any] | None = None,
    ) -> int:
        """Write the file and return its size in bytes. OSError where that cannot be done."""
        import jinja2
        from markupsafe import Markup

        held: list[list[int]] = [[] for _ in rollouts]
        for block in blocks:
            held[block.rollout].append(block.position)
        data = {
            "rollouts": list(rollouts),
            "columns": list(columns),
            "kinds": list(TOKEN_KINDS),
            "held": held,
            "marks": MARKS,
            "words": words is not None,
            "start": _start(rollouts),
            "sweep": sweep,
        }
        blobs = [(f"rows-{i}", table) for i, table in enumerate(tables)]
        blobs += [("words", words)] if words is not None else []
        blobs += [(f"t-{block.rollout}-{block.position}", block.text) for block in blocks]
        environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
        html = environment.from_string(self._template).render(
            policy=_policy(self._scripts),
            title=_title(rollouts),
            version=__version__,
            overall=overall,
            marks=MARKS,
            skipped=skipped,
            left_out=left_out,
            css=Markup(self._css),
            vendor_css=Markup(self._vendor_css),
            data=Markup(json_in_html(data)),
            scripts=[Markup(script) for script in self._scripts],
            blobs=blobs,
        )
        content = html.encode("utf-8", "replace")
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_name(f".{out.name[:40]}.{os.getpid()}.part")
        try:
            part.write_bytes(content)
            os.replace(part, out)
        except OSError as error:  # that of the file asked for, not of the one beside it
            raise OSError(error.errno, error.strerror, str(out)) from error
        finally:
            part.unlink(missing_ok=True)
        return len(content)


def _policy(scripts: Sequence[str]) -> str:
    """No request to anywhere, and only our own scripts run, whatever else the page may hold."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{one}'" for one in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _title(rollouts: Sequence[dict[str, Any]]) -> str:
    if len(rollouts) == 1:
        return str(rollouts[0]["name"])
    return f"{rollouts[0]['name']} to {rollouts[-1]['name'].removeprefix('rollout ')}" if rollouts else "no rollout"


def _start(rollouts: Sequence[dict[str, Any]]) -> int:
    """The rollout that the page opens with: the worst verdict, then the largest mean difference."""
    keys = [(LEVELS.index(one["verdict"]["level"]), one["abs_diff"]["mean"] or 0.0) for one in rollouts]
    return keys.index(max(keys)) if keys else 0


# --- numbers behind the charts; the page draws them ---


_BINS = 61  # odd: the middle bar is δ around 0
_COLUMNS, _ROWS = 40, 31
_LOWEST = -20.0  # log μ below this share the first column


def round_up(value: float) -> float:
    """The next number of the form 1, 2 or 5 times a power of ten; 1e-6 at least."""
    if not value > 1e-6:
        return 1e-6
    power: float = 10.0 ** math.floor(math.log10(value))
    return float(next((step * power for step in (1, 2, 5, 10) if value <= step * power * (1 + 1e-9)), 10 * power))


def histogram(table: TokenTable) -> dict[str, Any] | None:
    """Comparable tokens by δ. The outermost two bars hold everything beyond ``limit``, in nats."""
    delta = table.delta
    if not len(delta):
        return None
    limit = _limit(table)
    width = 2 * limit / (_BINS - 2)
    place = ((delta + limit) / width).floor().clamp(-1, _BINS - 2).long() + 1
    return {"limit": limit, "width": width, "counts": torch.bincount(place, minlength=_BINS).tolist()}


def density(table: TokenTable) -> dict[str, Any] | None:
    """Comparable tokens by log μ (columns) and δ (rows): ``cells`` of (column, row, count), empty ones left out."""
    delta = table.delta
    if not len(delta):
        return None
    limit = _limit(table)
    rollout = table.rollout[table.comparable].double()
    low = max(_LOWEST, min(math.floor(float(rollout.min())), -1))
    high = max(0.0, math.ceil(min(float(rollout.max()), 1.0)))  # a log-prob above 0 is a fault that should show
    step = (high - low) / _COLUMNS
    column = ((rollout - low) / step).floor().clamp(0, _COLUMNS - 1).long()
    width = 2 * limit / (_ROWS - 2)
    row = ((delta + limit) / width).floor().clamp(-1, _ROWS - 2).long() + 1
    counts = torch.bincount(column * _ROWS + row, minlength=_COLUMNS * _ROWS)
    filled = counts.nonzero().flatten().tolist()
    cells = [[place // _ROWS, place % _ROWS, int(counts[place])] for place in filled]
    return {
        "low": low,
        "step": step,
        "columns": _COLUMNS,
        "limit": limit,
        "width": width,
        "rows": _ROWS,
        "cells": cells,
    }


def _limit(table: TokenTable) -> float:
    (limit,) = percentiles(table.size, (0.995,))
    return round_up(limit)


def curve(sweep: Sweep, result: WhatIf) -> dict[str, Any]:
    """What each value of a sweep's parameter does to the tokens of all rollouts."""
    totals = [effect.total for effect in result.effects]
    first = sweep.policies[0]
    return {
        "policy": label(first.changed(**{sweep.parameter: PRESETS[first.name].parameters[sweep.parameter]})),
        "framework": first.framework,
        "parameter": sweep.parameter,
        "values": [effect.policy.parameters[sweep.parameter] for effect in result.effects],
        "n_tokens": totals[0].n_tokens if totals else 0,
        "touched": [
            (one.tokens_dropped + one.tokens_clipped) / one.n_tokens if one.n_tokens else None for one in totals
        ],
        "mean_weight": [one.mean_weight for one in totals],
        "ess": [one.ess for one in totals],
        "advantage_kept": [one.advantage_kept for one in totals],
        "skipped": list(result.skipped.values()),
    }
