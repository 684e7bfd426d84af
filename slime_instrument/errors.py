"""The exceptions of this package, and the five parts every message of ours has.

Each exception also is the builtin that callers already catch. Standard library only: this module is imported at
interpreter start.
"""

from __future__ import annotations

__all__ = [
    "DumpError",
    "DumpFormatError",
    "InstrumentError",
    "PatchError",
    "SettingsError",
    "TrainingPathError",
    "five_parts",
]


class InstrumentError(Exception):
    """Base of every error that slime_instrument raises on purpose."""


class SettingsError(InstrumentError, ValueError):
    """A ``SLIME_INSTRUMENT_*`` variable has a value that cannot be used. Raised when arming or when training starts."""


class TrainingPathError(InstrumentError, ValueError):
    """The path of the train dump cannot work for this run. Raised when training starts, before the first rollout."""


class PatchError(InstrumentError, RuntimeError):
    """A target could not be patched, or a patch could not be taken back."""


class DumpError(InstrumentError, RuntimeError):
    """A dump could not be made. Raised into training in strict mode only; otherwise logged once and counted."""


class DumpFormatError(InstrumentError, ValueError):
    """A file is not a dump that this package can read, or is not safe to read."""


def five_parts(subject: str, *, expected: str, found: str, follows: str, next_step: str) -> str:
    """Build an error message: subject, what was expected, what was found, what follows, what to do next.

    >>> print(five_parts("SLIME_INSTRUMENT_EVERY", expected="a whole number above 0", found="'often'",
    ...                  follows="Nothing was armed.", next_step="Set it to 1 to dump every rollout."))
    slime_instrument: SLIME_INSTRUMENT_EVERY: expected a whole number above 0, found 'often'. Nothing was armed. \
Set it to 1 to dump every rollout.
    """
    return f"slime_instrument: {subject}: expected {expected}, found {found}. {follows} {next_step}"
