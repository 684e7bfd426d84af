"""Whether the interpreter's start-up files are in place, so that an armed variable has something to act on."""

from __future__ import annotations

import site
import sys
from pathlib import Path

__all__ = ["START_FILES", "advice", "startup_file"]

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
