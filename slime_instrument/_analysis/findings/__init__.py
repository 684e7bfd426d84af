"""One file per finding. A file may ask another whether its cause fits, where both would look alike.

A file declares ``CODE``, ``ORDER`` and ``find(view) -> Finding | None``. Lower orders come first, and the tokens that
they explain are hidden from higher ones, so that one fault has one name. Findings of equal order see the same tokens:
where both fit, both are said.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from itertools import groupby
from types import ModuleType

from slime_instrument._analysis.diagnosis import Finding
from slime_instrument._analysis.evidence import View

__all__ = ["diagnose", "known"]


def known() -> list[ModuleType]:
    """The modules of this folder, in the order in which they look."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return sorted(modules, key=lambda module: (module.ORDER, module.CODE))


def diagnose(view: View) -> list[Finding]:
    """Every finding that the data shows; none on a clean pair."""
    findings: list[Finding] = []
    for _, modules in groupby(known(), key=lambda module: module.ORDER):
        found = [finding for module in modules if (finding := module.find(view)) is not None]
        findings += found
        for finding in found:
            if finding.tokens is not None:
                explained = finding.tokens if view.explained is None else view.explained | finding.tokens
                view = replace(view, explained=explained, memo={})
    return findings
