"""Ask plugins for checks of their own, and look at what a configuration selects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from coupler.config.options import SECTIONS, section
from coupler.config.schema import RunConfig
from coupler.errors import CouplerError
from coupler.executors.interpreter import import_there
from coupler.plugins.description import register
from coupler.plugins.finding import Finding, Verdict, first_line, ok, problem
from coupler.plugins.manager import Plugins, Source
from coupler.system.contained import Call, Contained
from coupler.system.installed import open_entry
from coupler.system.shapes import each_of

# A check may import what its backend needs, from a cold disk.
LIMIT_S = 120.0
HOOK = "coupler_doctor"


class Checks:
    """Runs the checks of plugins that no configuration selects, in their own processes.

    They start when this is made, when this process has imported nothing heavy.
    """

    def __init__(self, plugins: Plugins) -> None:
        self.plugins = plugins
        others = [source for source, is_here in plugins.implementing(HOOK) if not is_here]
        self.sources = {str(number): source for number, source in enumerate(others)}
        calls = {
            key: Call("coupler.doctor.plugins:answers", (source.module,))
            for key, source in self.sources.items()
        }
        self.calls = Contained(calls, LIMIT_S)

    def others(self) -> Iterator[Finding]:
        """Yield what the plugins find that are not selected."""
        answers = self.calls.all()
        for key, source in self.sources.items():
            answer = answers[key]
            try:
                if answer.error:
                    raise CouplerError(answer.error)
                yield from [_finding(plain) for plain in answer.value]
            except (CouplerError, TypeError, ValueError, KeyError) as error:
                text = str(error) if answer.error else f"{first_line(error)}"
                yield _failed(source, text)

    def selected(self, config: RunConfig | None) -> Iterator[Finding]:
        """Yield what the plugins find that the configuration selects."""
        for source, is_here in self.plugins.implementing(HOOK):
            if not is_here:
                continue
            try:
                for _, found in self.plugins.answers(HOOK, [source], config=config):
                    yield from each_of(HOOK, found, Finding)
            except Exception as error:  # a plugin's boundary
                yield _failed(source, first_line(error))


def answers(value: str) -> list[dict[str, str]]:
    """Return the findings of a plugin in plain data. It is given no configuration."""
    module = open_entry(value)
    found: list[Finding] = []
    for impl in getattr(register(module).hook, HOOK).get_hookimpls():
        found += each_of(HOOK, impl.function(*(None for _ in impl.argnames)), Finding)
    return [asdict(finding) for finding in found]


def classes(plugins: Plugins, config: RunConfig) -> Iterator[Finding]:
    """Import the class of every backend that a configuration names, where it runs."""
    chosen = [(kind, s) for path, kind in SECTIONS.items() if (s := section(config, path))]
    named = {(kind, inner.name, getattr(inner, "python", "")) for kind, inner in chosen}
    named |= {("tracker", name, "") for name in config.trackers}
    named.add(("sharding", config.sync.manager, ""))
    named |= {("transport", name, "") for name in (config.sync.transport,) if name}

    target = "coupler.executors.classes:unusable"
    calls = {f"{k}={n}": Call(target, (k, n)) for k, n, python in named if not python}
    here = Contained(calls, LIMIT_S).all()
    for kind, name, python in sorted(named):
        key = f"{kind}={name}"
        try:
            answer = None if python else here[key]
            said = import_there(kind, name, python) if answer is None else answer.value
            said = said or (answer.error if answer else "")
        except CouplerError as error:
            said = str(error)
        if said:
            first, *rest = said.splitlines()
            tried = next((t.partition("try:")[2].strip() for t in rest if "try:" in t), "")
            source = plugins.owner_of(kind, name)
            yield problem(key, first, tried or (source.fix if source else "correct its name"))
        else:
            yield ok(key, f"imports with {python}" if python else "imports")


def _finding(plain: dict[str, str]) -> Finding:
    return Finding(plain["name"], Verdict(plain["verdict"]), plain["text"], plain["fix"])


def _failed(source: Source, why: str) -> Finding:
    return problem("plugin", f"the checks of {source} failed: {why}", f"report it to {source}")
