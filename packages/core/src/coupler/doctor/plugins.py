"""Ask plugins for checks of their own, and look at what a configuration selects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

from coupler.config.options import SECTIONS, section
from coupler.config.schema import RunConfig
from coupler.errors import CouplerError
from coupler.executors.interpreter import import_there
from coupler.plugins.description import register
from coupler.plugins.finding import Finding, Verdict, first_line, ok, problem
from coupler.plugins.manager import Plugins, Source
from coupler.system.contained import Call, Contained, shortened
from coupler.system.installed import open_entry
from coupler.system.shapes import each_of, fits

# A check may import what its backend needs, from a cold disk.
LIMIT_S = 120.0
HOOK, MAX_FINDINGS = "coupler_doctor", 100
FINDING = {"name": str, "verdict": str, "text": str, "fix": str}


class Checks:
    """Runs the checks of plugins that no configuration selects, in their own processes.

    They start when this is made, when this process has imported nothing heavy.
    """

    def __init__(self, plugins: Plugins) -> None:
        self.plugins = plugins
        asked = plugins.complete().all.items()
        self.asked = [source for source, d in asked if HOOK in d.hooks and d.usable]
        others = [source for source in self.asked if source not in plugins.imported]
        self.sources = {str(number): source for number, source in enumerate(others)}
        calls = {
            key: Call(
                "coupler.doctor.plugins:answers",
                (source.module,),
            )
            for key, source in self.sources.items()
        }
        self.calls = Contained(calls, LIMIT_S)

    def others(self) -> Iterator[Finding]:
        """Yield what the plugins find that are not selected."""
        answers = self.calls.all()
        for key, source in self.sources.items():
            value, error = answers[key].value, answers[key].error
            if not error and not fits(
                value,
                {"findings": [FINDING], "error": str},
            ):
                error = "its answer is damaged"
            for plain in () if error else value["findings"]:
                verdict = Verdict(plain.pop("verdict"))
                yield Finding(**plain, verdict=verdict)
            if error or value["error"]:
                yield _failed(
                    source,
                    error or value["error"],
                )

    def selected(self, config: RunConfig | None) -> Iterator[Finding]:
        """Yield what the plugins find that the configuration selects."""
        for source in self.asked:
            if source in self.plugins.imported:
                found, error = _findings(
                    source.module,
                    config,
                )
                yield from found
                if error:
                    yield _failed(source, error)


def answers(value: str) -> dict[str, Any]:
    """Return the findings of a plugin in plain data. It is given no configuration."""
    found, error = _findings(value, None)
    return {"findings": [asdict(finding) for finding in found], "error": error}


def _findings(value: str, config: RunConfig | None) -> tuple[list[Finding], str]:
    """Return what a plugin finds, and why it stopped if it failed."""
    found: list[Finding] = []
    try:
        for impl in getattr(
            register(open_entry(value)).hook,
            HOOK,
        ).get_hookimpls():
            for finding in islice(
                impl.function(*(config for _ in impl.argnames)),
                MAX_FINDINGS,
            ):
                found += each_of(HOOK, [finding], Finding)
    except (Exception, SystemExit) as error:  # a plugin's boundary
        return found, shortened(first_line(error))
    return found, ""


def classes(plugins: Plugins, config: RunConfig) -> Iterator[Finding]:
    """Import the class of every backend that a configuration names, where it runs."""
    named = sorted(_named(config))
    target = "coupler.executors.classes:unusable"
    calls = {f"{k}={n}": Call(target, (k, n)) for k, n, python in named if not python}
    here = Contained(calls, LIMIT_S).all()

    for kind, name, python in named:
        key = f"{kind}={name}"
        try:
            said = import_there(kind, name, python) if python else here[key].value
            said = said or ("" if python else here[key].error)
        except CouplerError as error:
            said = str(error)

        if said:
            first, *rest = said.splitlines()
            tried = next((t.partition("try:")[2].strip() for t in rest if "try:" in t), "")
            source = plugins.owner_of(kind, name)
            yield problem(key, first, tried or (source.fix if source else "correct its name"))
        else:
            yield ok(key, f"imports with {python}" if python else "imports")


def _named(config: RunConfig) -> set[tuple[str, str, str]]:
    """Return kind, name and interpreter of every backend that a run has."""
    chosen = [(kind, s) for path, kind in SECTIONS.items() if (s := section(config, path))]
    named = {(kind, inner.name, getattr(inner, "python", "")) for kind, inner in chosen}
    named |= {("tracker", name, "") for name in config.trackers}
    named.add(("sharding", config.sync.manager, ""))
    return named | {("transport", name, "") for name in (config.sync.transport,) if name}


def _failed(source: Source, why: str) -> Finding:
    return problem(
        "plugin",
        f"the checks of {source} failed: {why}",
        f"report it to {source}",
    )
