"""Where slime can be found on this machine, and which version it says it is."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

#: The folder to put on ``sys.path`` for the miniature, as a checkout's root is for slime.
MINIATURE = Path(__file__).parent / "miniature"


def is_source(folder: Path) -> bool:
    """Whether ``folder`` holds a real slime: its ``slime`` package, and not our miniature."""
    package = folder / "slime"
    if folder.resolve() == MINIATURE.resolve():
        return False
    return (package / "__init__.py").is_file() or (package / "backends").is_dir()


def find_sources() -> list[Path]:
    """Checkouts in ``$SLIME_SOURCES`` (separated as in PATH) and in ``~/.cache/slime-instrument/sources``."""
    return list(dict.fromkeys(folder for folder in _candidates() if is_source(folder)))


def default_source() -> Path | None:
    """``$SLIME_SOURCE``, else an installed slime, else None: then the miniature is what there is."""
    named = os.environ.get("SLIME_SOURCE")
    if named:
        return Path(named)
    try:
        spec = importlib.util.find_spec("slime")
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location).parent
        # A folder that merely is called "slime" is a namespace package; the trainer is what makes it slime.
        if is_source(folder) and (folder / "slime" / "backends" / "megatron_utils").is_dir():
            return folder
    return None


def source_version(folder: Path) -> str:
    """The version in the checkout's ``setup.py`` or ``pyproject.toml``; without one, the folder's name."""
    for name in ("setup.py", "pyproject.toml"):
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except OSError:
            continue
        found = re.search(r"""^\s*version\s*=\s*["']([^"']+)["']""", text, re.MULTILINE)
        if found:
            return found[1]
    return folder.name


def _candidates() -> Iterator[Path]:
    for entry in os.environ.get("SLIME_SOURCES", "").split(os.pathsep):
        if entry:
            yield Path(entry)
    cache = Path.home() / ".cache" / "slime-instrument" / "sources"
    if cache.is_dir():
        yield from sorted(cache.iterdir())
