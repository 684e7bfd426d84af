"""What a patch is, and how it is applied and removed. Needs the wrapt that pyproject.toml names: agents and tracers pin
an older one, which may stand in front of it on the path."""

import re

import wrapt

from slime_instrument._errors import InstrumentError, five_parts

_NEEDED = (2, 5, 2)
_FOUND: str = vars(wrapt)["__version__"]


class WraptTooOld(InstrumentError, ImportError):
    """The wrapt that this process imports cannot do what patches need."""


if tuple(map(int, re.findall(r"\d+", _FOUND)[:3])) < _NEEDED:
    raise WraptTooOld(
        five_parts(
            "wrapt",
            expected=f"{'.'.join(map(str, _NEEDED))} or later",
            found=f"{_FOUND} in {wrapt.__path__[0]}",
            follows="Nothing is patched; training is unaffected.",
            next_step="pip install -U wrapt, or take that folder off PYTHONPATH.",
        )
    )
