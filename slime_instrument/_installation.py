"""What is installed here: start-up files of the interpreter, without which the variable arms nothing, and versions of
what a dump came from. Looks at metadata and files; imports nothing of slime's."""

from __future__ import annotations

import importlib.metadata
import re
import site
import sys
from pathlib import Path

from slime_instrument import __version__
from slime_instrument._switch import package

__all__ = ["START_FILES", "advice", "checkout_version", "installed", "startup_file", "versions"]

# Python 3.15 ignores the import line of a .pth that has a .start beside it.
START_FILES = (
    ("slime_instrument.start", "slime_instrument.pth") if sys.version_info >= (3, 15) else ("slime_instrument.pth",)
)


def startup_file() -> Path | None:
    """The file that arms interpreters of this environment when ``SLIME_INSTRUMENT=1``; None if there is none, as when
    the package is only found through PYTHONPATH or the working directory."""
    folders = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
    for folder in folders:
        for name in START_FILES:
            if (path := Path(folder, name)).is_file():
                return path
    return None


def advice() -> str | None:
    """None when the variable alone arms a new interpreter of this environment; else what to do, in one sentence."""
    if startup_file() is not None:
        return None
    return (
        f"{START_FILES[0]} is not in the site-packages of {sys.prefix}, so SLIME_INSTRUMENT=1 alone arms nothing here: "
        "install the package with pip (an editable install will do), or put sitecustomize_example on PYTHONPATH"
    )


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
