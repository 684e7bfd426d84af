"""Versions of what a dump came from. Looks at metadata and files; imports nothing of slime's."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

from slime_instrument import __version__
from slime_instrument._switch import package

__all__ = ["checkout_version", "installed", "versions"]

_VERSION = re.compile(r"""^\s*version\s*=\s*["']([^"']+)["']""", re.MULTILINE)


def installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def checkout_version(folder: Path) -> str | None:
    """The version that a source checkout declares in setup.py or pyproject.toml."""
    for name in ("setup.py", "pyproject.toml"):
        try:
            match = _VERSION.search((folder / name).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        if match is not None:
            return match[1]
    return None


def slime_version() -> str | None:
    """Of the slime that this process imported: its own word, its folder's, then the installed distribution's."""
    module = sys.modules.get(package())
    if module is None:
        return installed(package())
    stated = getattr(module, "__version__", None)
    paths = list(getattr(module, "__path__", []))
    return stated or (checkout_version(Path(paths[0]).parent) if paths else None) or installed(package())


def versions() -> dict[str, str | None]:
    """Of slime_instrument, slime, torch and megatron-core, as a dump's provenance has them."""
    return {
        "slime_instrument": __version__,
        "slime": slime_version(),
        "torch": installed("torch"),
        "megatron_core": installed("megatron-core"),
    }
