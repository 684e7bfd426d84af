"""The environment as one typed object.

Standard library only: settings are read just before slime is imported, when nothing heavy may be loaded yet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from slime_instrument._errors import SettingsError, five_parts
from slime_instrument._switch import OFF, ON, PREFIX, ROUTE_VARIABLE
from slime_instrument._thresholds import NO_THRESHOLDS, Thresholds, parse_thresholds

__all__ = ["Pins", "Settings"]

T = TypeVar("T")


@dataclass(frozen=True)
class Pins:
    """Rollout ids that rotation never removes: single ids and inclusive ranges."""

    ranges: tuple[tuple[int, int], ...] = ()

    def __contains__(self, rollout_id: object) -> bool:
        return isinstance(rollout_id, int) and any(first <= rollout_id <= last for first, last in self.ranges)

    def __str__(self) -> str:
        return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in self.ranges)


@dataclass(frozen=True)
class Settings:
    """What the user asked for. Build it with :meth:`from_environment`.

    ``enabled`` is None while ``SLIME_INSTRUMENT`` is unset: then only an explicit import arms. ``bucket_mb`` bounds, in
    MiB, the pieces into which a rank joins tensors on a device before it copies and sends them. ``timeout_s`` bounds
    the wait for another rank and the time in which no byte moves, in seconds. ``async_write``: training goes on while
    the file is being written; ``async_busy``: a dump that comes while an earlier file is still being written waits for
    it ("wait") or is skipped ("skip"). ``metrics``: mismatch metrics are logged after each dump. ``alert``: thresholds
    on them that are worth a warning. ``package``: the name of the package that is patched; what uses it asks
    :func:`~slime_instrument._switch.package`. ``unknown`` lists variables with our prefix that mean nothing here; they
    are reported, not refused, so that a newer setting does not stop an older install.
    """

    enabled: bool | None = None
    strict: bool = False
    every: int = 1
    keep_last: int | None = None
    pin: Pins = Pins()
    bucket_mb: float = 64.0
    timeout_s: float = 120.0
    async_write: bool = False
    async_busy: str = "wait"
    cp_fields: tuple[str, ...] = ()
    metrics: bool = False
    alert: Thresholds = NO_THRESHOLDS
    package: str = "slime"
    unknown: tuple[str, ...] = ()

    @property
    def bucket_bytes(self) -> int:
        return max(1, int(self.bucket_mb * (1 << 20)))

    def as_dict(self) -> dict[str, Any]:
        """Plain values under the names of the variables, for ``status``."""
        shown = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "unknown"}
        shown["pin"] = str(self.pin)
        shown["cp_fields"] = list(self.cp_fields)
        shown["alert"] = str(self.alert)
        return {PREFIX if name == "enabled" else f"{PREFIX}_{name.upper()}": value for name, value in shown.items()}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read and check every variable; the first bad one raises :class:`SettingsError`, naming it."""
        environment = os.environ if environment is None else environment
        known = {f"{PREFIX}_{name.upper()}": (name, parser) for name, parser in _PARSERS.items()}
        known[PREFIX] = ("enabled", _switch)
        given = {name: value for name, value in environment.items() if name == PREFIX or name.startswith(PREFIX + "_")}
        values = {
            known[name][0]: _parse(name, text.strip(), known[name][1]) for name, text in given.items() if name in known
        }
        return cls(**values, unknown=tuple(sorted(set(given) - set(known) - _NOT_SETTINGS)))


def is_due(settings: Settings, rollout_id: Any) -> bool:
    """Every ``EVERY``-th rollout, counted by its id, and every pinned one. An id that is no number is always due."""
    if not isinstance(rollout_id, int):
        return True
    return rollout_id % settings.every == 0 or rollout_id in settings.pin


def _parse(name: str, text: str, parser: Callable[[str], T]) -> T:
    try:
        return parser(text)
    except ValueError as error:
        raise SettingsError(
            five_parts(
                name,
                expected=str(error),
                found=repr(text),
                follows="Nothing was instrumented.",
                next_step="Correct the variable, or unset it for the default.",
            )
        ) from None


def _switch(text: str) -> bool:
    if text.lower() in ON | OFF:
        return text.lower() in ON
    raise ValueError("1 or 0")


def _whole(text: str) -> int:
    if _is_number(text) and int(text) > 0:
        return int(text)
    raise ValueError("a whole number above 0")


def _is_number(text: str) -> bool:
    """Plain decimal digits; no more of them than a 64-bit number has."""
    return text.isascii() and text.isdigit() and len(text) < 19


def _optional_whole(text: str) -> int | None:
    return None if not text else _whole(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 < value < float("inf"):
        return value
    raise ValueError("a number above 0")


def _seconds(text: str) -> float:
    # gloo reads a wait of 0 ms as "for ever", and a timedelta ends at 10^9 days.
    try:
        value = _positive(text)
    except ValueError:
        value = 0.0
    if 0.01 <= value <= 1e6:
        return value
    raise ValueError("a number of seconds from 0.01 to 1000000")


def _wait_or_skip(text: str) -> str:
    if text.lower() in ("wait", "skip"):
        return text.lower()
    raise ValueError("wait or skip")


def _pins(text: str) -> Pins:
    ranges = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = item.partition("-")
        if not (_is_number(first) and (not dash or _is_number(last))) or (dash and int(first) > int(last)):
            raise ValueError("rollout ids and ranges such as 0,10-20")
        ranges.append((int(first), int(last) if dash else int(first)))
    return Pins(tuple(ranges))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if all(name.isidentifier() for name in names):
        return names
    raise ValueError("field names separated by commas")


def _package(text: str) -> str:
    if not text or text.isidentifier():
        return text or "slime"
    raise ValueError("the name of a package")


_PARSERS: dict[str, Callable[[str], Any]] = {
    "strict": _switch,
    "every": _whole,
    "keep_last": _optional_whole,
    "pin": _pins,
    "bucket_mb": _positive,
    "timeout_s": _seconds,
    "async_write": _switch,
    "async_busy": _wait_or_skip,
    "cp_fields": _names,
    "metrics": _switch,
    "alert": parse_thresholds,
    "package": _package,
}
_NOT_SETTINGS = frozenset({ROUTE_VARIABLE})  # never set by users
