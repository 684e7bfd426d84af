"""Modules made by a test, patches for them, and snapshots that prove what changed."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_instrument._patching.declaration import Advice, Call, Patch, Target

Snapshot = dict[str, dict[str, Any]]


class World:
    """A folder of modules. ``snapshot`` holds every module's and class's own names with the very objects."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: list[str] = []

    def write(self, name: str, source: str) -> None:
        path = self.folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
        self.names.append(name)
        importlib.invalidate_caches()

    def load(self, name: str) -> Any:
        return importlib.import_module(name)

    def make(self, name: str, source: str) -> Any:
        self.write(name, source)
        return self.load(name)

    def snapshot(self) -> Snapshot:
        found: Snapshot = {}
        for name in self.names:
            module = sys.modules.get(name)
            if module is None:
                continue
            found[name] = dict(vars(module))
            for key, value in vars(module).items():
                if isinstance(value, type):
                    found[f"{name}.{key}"] = dict(vars(value))
        return found

    def forget(self) -> None:
        for name in self.names:
            sys.modules.pop(name, None)


def same(before: Snapshot, after: Snapshot) -> bool:
    """Same keys in the same order, and identical objects."""
    return [
        (place, key, id(value)) for place, names in before.items() for key, value in names.items() if key != "__spec__"
    ] == [
        (place, key, id(value)) for place, names in after.items() for key, value in names.items() if key != "__spec__"
    ]


def patch(target: str, before: Callable[[Call], Advice | None] = lambda call: None, **more: Any) -> Patch:
    """A patch of ``module:attribute``, or of several such alternatives with spaces between them."""
    targets = tuple(Target(*text.split(":")) for text in target.split())
    return Patch(**{"name": "it", "group": "g", "targets": targets, "before": before, **more})


def tagging(tag: str) -> Callable[[Call], Advice]:
    """Advice that makes each call visible: the result becomes ``(tag, result)``."""
    return lambda call: Advice(after=lambda result: (tag, result))
