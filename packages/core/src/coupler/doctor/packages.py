"""Check what is installed.

These are plugins, their requirements, and the ranges that they were tested with.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from coupler.plugins.backend import Kind
from coupler.plugins.finding import Finding, ok, problem, warning
from coupler.plugins.manager import Plugins
from coupler.run.tested import tested_ranges


def plugins_load(plugins: Plugins) -> Iterator[Finding]:
    """Name plugins that do not load, cannot be selected, or are installed twice."""
    rows = plugins.rows()
    for source, error in plugins.broken.items():
        yield problem("plugin", f"{source} failed to load: {error}", source.fix)
    for row in rows:
        fix = {
            "duplicate": (
                f"pip uninstall {row.distribution}, or COUPLER_DISABLE_PLUGINS={row.distribution}"
            ),
            "incompatible": f"pip install --upgrade coupler-core {row.distribution}",
        }.get(row.state)
        if fix is not None:
            text = f"{row.kind}={row.name} of {row.distribution}: {row.detail}"
            yield problem("plugin", text, fix)
    yield from (warning("plugin", text) for text in (*plugins.stale, *plugins.unknown()))

    names = [
        f"{row.kind}={row.name}"
        for row in rows
        if row.state == "available" and row.kind in ("engine", "rollout")
    ]
    yield ok("plugins", ", ".join(names))


def requirements(plugins: Plugins) -> Iterator[Finding]:
    """Compare what each plugin and torch ask pip for with what is installed."""
    names = sorted({row.distribution for row in plugins.rows() if row.distribution})
    problems = [finding for name in (*names, "torch") for finding in _unmet(name)]
    yield from problems or [ok("requirements", f"of {', '.join(names)} are met")]


def ranges(plugins: Plugins) -> Iterator[Finding]:
    """Name versions outside the range that a plugin was tested with."""
    every = [(kind, name) for kind in Kind for name in plugins.declared(kind)]
    for one in tested_ranges(plugins, every):
        if one.within:
            yield ok(one.distribution, f"{one.found}, within {one.tested} of {one.source}")
        else:
            yield problem(one.distribution, one.problem, one.fix)


def _unmet(dist: str) -> Iterator[Finding]:
    try:
        wanted = [Requirement(text) for text in requires(dist) or ()]
    except PackageNotFoundError:
        return

    for requirement in wanted:
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue

        fix = f"pip install '{requirement.name}{requirement.specifier}'"
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield problem(dist, f"needs {requirement.name}, which is not installed", fix)
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield problem(
                dist, f"needs {requirement.name}{requirement.specifier}, {found} is installed", fix
            )
