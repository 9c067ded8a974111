"""Collect places of one kind of fault, and report them on one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from coupler.errors import CouplerError
from coupler.plugins.finding import Finding, from_error, problem, warning

# The longest example that a line repeats.
MAX_EXAMPLE = 200
# Parts of a message that differ from row to row.
VARIES = re.compile(r"[\[{(].*|\d+|'[^']*' becomes.*")


@dataclass(slots=True)
class Spotted:
    """Faults, by kind: how many there are, and the first with its place."""

    kinds: dict[str, list[tuple[str, str | CouplerError]]] = field(default_factory=dict)

    def add(self, place: str, fault: str | CouplerError) -> None:
        """Count a fault. An error's kind is its message, without what varies."""
        text = str(fault).splitlines()[0].removeprefix(place)
        kind = VARIES.sub("", text) if isinstance(fault, CouplerError) else ""
        self.kinds.setdefault(kind, []).append((place, fault))

    def __bool__(self) -> bool:
        return bool(self.kinds)

    def warnings(self, name: str, total: int, what: str) -> Iterator[Finding]:
        """Yield a warning: ``what``, how many of ``total`` rows, and the first."""
        for found in self.kinds.values():
            place, fault = found[0]
            yield warning(
                name,
                f"{what}: {len(found)} of {total} rows; the first is {place}: {_one_line(fault)}",
            )

    def problems(self, name: str, total: int) -> Iterator[Finding]:
        """Yield a problem for each kind of error."""
        for found in self.kinds.values():
            place, error = found[0]
            if not isinstance(error, CouplerError):
                error = CouplerError(error)
            first = from_error(name, error, f"correct {place}")
            text = first.text
            if place not in text:
                text = f"{place}: {text}"

            yield problem(
                name,
                f"refused: {len(found)} of {total} rows; the first: {text}",
                first.fix,
            )


def _one_line(fault: str | CouplerError) -> str:
    text = " ".join(str(fault).split())
    if len(text) <= MAX_EXAMPLE:
        return text
    return f"{text[:MAX_EXAMPLE]}..."
