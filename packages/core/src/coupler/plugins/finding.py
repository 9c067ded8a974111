"""Finding is the outcome of one check of ``coupler doctor``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from coupler.errors import CouplerError


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding is one line of the report.

    A problem, and nothing else, says how to fix it, on one line.
    """

    name: str
    """The name of the check, for example ``driver``."""
    verdict: Verdict
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        if bool(self.fix) != (self.verdict is Verdict.PROBLEM) or "\n" in self.text + self.fix:
            raise ValueError(f"a problem, and nothing else, has a fix; both are one line: {self}")


def ok(name: str, text: str) -> Finding:
    return Finding(name, Verdict.OK, text)


def warning(name: str, text: str) -> Finding:
    return Finding(name, Verdict.WARNING, text)


def problem(name: str, text: str, fix: str) -> Finding:
    return Finding(name, Verdict.PROBLEM, text, fix)


def from_error(name: str, error: CouplerError, fix: str) -> Finding:
    """Make a problem of an error.

    The fix is what the error names after ``try:``, and ``fix`` where it names nothing.
    """
    first, *rest = str(error).splitlines()
    tried = next((line.partition("try:")[2].strip() for line in rest if "try:" in line), "")
    detail = " ".join(line.strip() for line in rest if "try:" not in line)

    return problem(name, f"{first} {detail}".strip(), tried or fix)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
