"""Find plugins, and read what each declares in a process that its code cannot leave.

A plugin is an entry point whose value is a module, for example ``acme =
"coupler_engine_acme.plugin"``. ``COUPLER_PLUGINS=module,...`` adds modules without
packaging, and ``COUPLER_DISABLE_PLUGINS=name,...`` leaves entry points or distributions
out.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from coupler.errors import CouplerError
from coupler.system.contained import Answer, Call, shortened
from coupler.system.installed import Entry, entries
from coupler.system.remembered import Question, Remembered

ADDED, DISABLED = "COUPLER_PLUGINS", "COUPLER_DISABLE_PLUGINS"
# Reading one plugin may take so long. One that was asked for by name, and was not read
# within this time, gets the second.
LIMIT_S, LONG_LIMIT_S = 5.0, 60.0
# Plugins that nobody asked for are waited for so long, or as long as others took.
GRACE_S, MAX_GRACE_S = 0.12, 1.2
SLOW = f"it takes longer than {LIMIT_S:.0f} s to import; a plugin imports nothing heavy"


@dataclass(frozen=True, slots=True)
class Source:
    """Source is the origin of a plugin: an entry point, or a module.

    Attributes:
        name: of the entry point, or of the module that COUPLER_PLUGINS names.
        distribution: empty for a module that COUPLER_PLUGINS names.
        module: the value of the entry point.
    """

    name: str
    distribution: str = ""
    version: str = ""
    module: str = ""

    def __str__(self) -> str:
        if not self.distribution:
            return f"{self.name} (module)"
        return f"{self.name} ({self.distribution} {self.version})"

    @property
    def is_core(self) -> bool:
        """Tell whether core brings this code, whoever points at it."""
        return self.module.partition(".")[0] == "coupler"

    @property
    def fix(self) -> str:
        """Return the command to type when this plugin does not load.

        pip also brings a missing dependency of it.
        """
        if not self.distribution:
            return f"correct the module {self.name}, or take it out of {ADDED}"
        return f"pip install --upgrade {self.distribution}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Reader says how plugins of one group are read.

    Attributes:
        target: ``"package.module:function"``, which gets the value of an entry point
            and returns what JSON can write.
        parse: makes an object of that, or raises a CouplerError.
        identity: on what the answers depend, beside the plugins themselves.
        core: the distribution whose name no other may use.
    """

    group: str
    target: str
    parse: Callable[[Any], Any]
    identity: tuple[str, ...]
    files: tuple[str, ...]
    core: str


class Discovery:
    """Discovery holds what installed plugins declare, as it becomes known.

    Nothing that a plugin does raises here.

    Attributes:
        known: what each plugin that was read declares.
        broken: why a plugin cannot be used.
        disabled: what COUPLER_DISABLE_PLUGINS left out.
        stale: a sentence for each second installation of a plugin, which Python does
            not use.
    """

    def __init__(self, reader: Reader) -> None:
        self.known: dict[Source, Any] = {}
        self.broken: dict[Source, str] = {}
        self.disabled: list[Source] = []
        self.stale: list[str] = []
        self._patient_until = time.monotonic() + GRACE_S

        self._reader = reader
        files = self._find()
        self._sources = {str(number): source for number, source in enumerate(files)}
        questions = {
            key: Question(
                Call(reader.target, (source.module,)),
                (*astuple(source), *reader.identity, *files[source][:1]),
                (*files[source], *reader.files),
                source.module.partition(":")[0],
            )
            for key, source in self._sources.items()
        }
        self._read = Remembered("plugins.json", questions, LIMIT_S)
        self._take(self._read.known)

    @property
    def late(self) -> list[Source]:
        """Plugins that have not been read yet."""
        return [self._sources[key] for key in self._read.pending]

    def wait(self, enough: Callable[[], bool]) -> None:
        """Read plugins until there is enough, and a moment longer for the others.

        What COUPLER_PLUGINS names is always waited for.
        """
        start = time.monotonic()
        while pending := self._read.pending:
            named = any(not self._sources[key].distribution for key in pending)
            had = not named and enough()
            seconds = self._patient_until - time.monotonic()
            if had and seconds <= 0:
                return

            self._take(self._read.wait(seconds if had else None))
            if not had and enough():
                # Where reading is slow, it is slow for all.
                now = time.monotonic()
                self._patient_until = now + min(max(GRACE_S, now - start), MAX_GRACE_S)

    def read_again(self, is_suspect: Callable[[Source], bool]) -> None:
        """Read what may have changed, and with patience a suspect that was slow."""
        slow = {key for key, answer in self._read.known.items() if answer.hung}
        self._take(self._read.again(self._read.remembered - slow, LIMIT_S))
        suspects = [key for key in slow if is_suspect(self._sources[key])]
        self._take(self._read.again(suspects, LONG_LIMIT_S))

    def _take(self, answers: Mapping[str, Answer]) -> None:
        """Keep what plugins declare, in the order in which they were found."""
        for key, answer in answers.items():
            source = self._sources[key]
            self.known.pop(source, None)
            self.broken.pop(source, None)
            try:
                if answer.error:
                    raise CouplerError(SLOW if answer.hung else answer.error)
                self.known[source] = self._reader.parse(answer.value)
            except CouplerError as error:
                self.broken[source] = str(error)

        found = self._sources.values()
        self.known = {source: self.known[source] for source in found if source in self.known}

    def _find(self) -> dict[Source, tuple[str, ...]]:
        """Return every plugin that is not disabled, with the records of its
        distribution.
        """
        blocked, first = set(_names_in(DISABLED)), dict[str, Entry]()
        found: dict[Source, tuple[str, ...]] = {}
        named = [
            (Source(e.name, e.distribution, e.version, e.value), e)
            for e in entries(self._reader.group)
        ]
        # Core's own come first: nobody else's entry takes a module of it.
        for source, entry in sorted(named, key=lambda pair: _normal(pair[1]) != self._reader.core):
            normal = _normal(entry)
            used = first.setdefault(normal, entry)
            is_core = normal == self._reader.core
            stale = ""
            if blocked & {source.name, source.distribution}:
                self.disabled.append(source)
            elif entry.problem:
                self.broken[source] = entry.problem
            elif is_core and not source.is_core:
                stale = f"{source} is not of core, whose name it has, and is not used"
            elif not is_core and (entry.place, entry.version) != (used.place, used.version):
                stale = (
                    f"{source.distribution} is installed twice: {used.version} in {used.place} is "
                    f"used, {entry.version} in {entry.place} is not"
                )
            elif source.module not in {other.module for other in found}:
                found[source] = entry.files
            elif source not in found:
                stale = f"{source} names the module of another plugin, and is not used"
            self.stale += [stale] if stale and stale not in self.stale else []

        added = [Source(shortened(name), module=name) for name in _names_in(ADDED)]
        modules = {source.module for source in found}
        return found | {source: () for source in added if source.module not in modules}


def _normal(entry: Entry) -> str:
    """Return the name of a distribution as the packaging standards compare it."""
    return re.sub(r"[-_.]+", "-", entry.distribution).lower()


def _names_in(variable: str) -> list[str]:
    return [name.strip() for name in os.environ.get(variable, "").split(",") if name.strip()]
