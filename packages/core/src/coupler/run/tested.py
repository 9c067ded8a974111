"""Compare installed versions with the ranges that plugins were tested with.

Nothing of it is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from coupler.plugins.manager import Plugins, Source


@dataclass(frozen=True, slots=True)
class Tested:
    """Tested is an installed distribution, and the range that a plugin names for it."""

    distribution: str
    found: str
    tested: str
    source: Source

    @property
    def within(self) -> bool:
        return SpecifierSet(self.tested).contains(self.found, prereleases=True)

    @property
    def problem(self) -> str:
        """Say that the version is outside of the range."""
        return f"{self.found} is outside the range {self.tested} that {self.source} was tested with"

    @property
    def fix(self) -> str:
        upgrade = self.source.distribution or self.source.name
        return (
            f"pip install '{self.distribution}{self.tested}'  or  pip install --upgrade {upgrade}"
        )


def tested_ranges(plugins: Plugins, selected: Iterable[tuple[str, str]]) -> Iterator[Tested]:
    """Yield every range that the selected backends declare.

    ``selected`` has pairs of kind and name. A distribution that is not installed is
    left out.
    """
    declared: dict[tuple[str, str], Source] = {}
    for kind, name in selected:
        for backend, source in plugins.find(kind, name)[:1]:
            for dist, tested in backend.tested.items():
                declared.setdefault((dist, tested), source)

    for (dist, tested), source in declared.items():
        try:
            yield Tested(dist, version(dist), tested, source)
        except PackageNotFoundError:
            continue
