"""One aligned train dump per rollout from an unedited slime, and the tools to read it.

Importing this package arms it: slime is patched when it is imported, unless ``SLIME_INSTRUMENT=0``. Everything else
is loaded when it is first used.
"""

from __future__ import annotations

from slime_instrument._activation.boot import arm_on_import as _arm_on_import

TYPE_CHECKING = False  # the typing module alone would double the cost of this import
if TYPE_CHECKING:
    from typing import Any

    from slime_instrument._analysis.compare import compare
    from slime_instrument._format.dumps import read_rollout_dump, read_train_dump
    from slime_instrument._runtime import instrument, instrumented, status, uninstrument

__all__ = [
    "__version__",
    "compare",
    "instrument",
    "instrumented",
    "read_rollout_dump",
    "read_train_dump",
    "status",
    "uninstrument",
]

__version__ = "0.1.0"

_HOME = {
    "compare": "_analysis.compare",
    "instrument": "_runtime",
    "instrumented": "_runtime",
    "status": "_runtime",
    "uninstrument": "_runtime",
    "read_rollout_dump": "_format.dumps",
    "read_train_dump": "_format.dumps",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


_arm_on_import()
