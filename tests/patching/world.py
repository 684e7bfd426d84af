"""Modules made by a test, patches for them, and snapshots that prove what changed."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from slime_instrument._patching.patch import Call, Patch, Target

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


Hook = Callable[[Call], Iterator[None]]


def doing(*, before: Any = None, after: Any = None, cleanup: Any = None) -> Hook:
    """A hook of up to three functions: each gets the call, ``before`` and ``after`` around a target that returns, and
    ``cleanup`` in any case."""

    def hook(call: Call) -> Iterator[None]:
        if before is not None:
            before(call)
        try:
            yield
        finally:
            if cleanup is not None:
                cleanup(call)
        if after is not None:
            after(call)

    return hook


def tagging(tag: str) -> Hook:
    """A hook that makes each call visible: the result becomes ``(tag, result)``."""

    def tag_it(call: Call) -> None:
        call.result = (tag, call.result)

    return doing(after=tag_it)


def patch(target: str, around: Hook | None = None, **more: Any) -> Patch:
    """A patch of ``module:attribute``, or of several such alternatives with spaces between them."""
    if around is None and "instead" not in more:
        around = doing()
    targets = tuple(map(Target.parse, target.split()))
    return Patch(**{"name": "it", "group": "g", "targets": targets, "around": around, **more})
