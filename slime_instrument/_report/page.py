"""The HTML file: template, style, scripts and data in one. Nothing from a dump ever becomes markup or script."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from slime_instrument import __version__
from slime_instrument._analysis.table import KINDS
from slime_instrument._analysis.verdict import LEVELS
from slime_instrument._report.answers import Answers
from slime_instrument._report.budget import Block

__all__ = ["MARKS", "Page", "json_in_html"]

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
            "kinds": list(KINDS),
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
