"""What the validator finds: one record per fault, errors and warnings apart."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Finding", "Findings", "ValidationReport"]


@dataclass(frozen=True)
class Finding:
    """One fault.

    Attributes:
        code: a stable name of the kind of fault.
        message: what was expected and what was found, with the numbers.
        file: the file it is in.
        sample: position in the file's ``samples`` (in the columns of an old per-rank file), or None.
        field: the field, or None.
    """

    code: str
    message: str
    file: str
    sample: int | None = None
    field: str | None = None


class Findings:
    """Collects the findings of one file; the checks only ever add to it."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)
        self.errors: list[Finding] = []
        self.warnings: list[Finding] = []

    def error(self, code: str, message: str, *, sample: int | None = None, field: str | None = None) -> None:
        """Something that makes the dump wrong."""
        self.errors.append(Finding(code, message, self.file, sample, field))

    def warning(self, code: str, message: str, *, sample: int | None = None, field: str | None = None) -> None:
        """Something to know about a dump that can be right."""
        self.warnings.append(Finding(code, message, self.file, sample, field))


@dataclass
class ValidationReport:
    """All findings of one call, over every file of it."""

    errors: list[Finding] = field(default_factory=list)
    warnings: list[Finding] = field(default_factory=list)

    @property
    def valid(self) -> bool:
        """Whether no file has an error. Warnings do not count."""
        return not self.errors

    @property
    def unreadable(self) -> list[Finding]:
        """Those errors that are about files that could not be looked into at all."""
        return [finding for finding in self.errors if finding.code == "unreadable"]

    def add(self, found: Findings) -> None:
        """Take over the findings of one file."""
        self.errors += found.errors
        self.warnings += found.warnings

    def as_dict(self) -> dict[str, Any]:
        """What ``slime-instrument validate --json`` prints."""
        return {
            "valid": self.valid,
            "errors": [asdict(finding) for finding in self.errors],
            "warnings": [asdict(finding) for finding in self.warnings],
        }
