"""Run every check, and render what it found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coupler.config.schema import RunConfig
from coupler.doctor import devices, host, packages, run
from coupler.doctor.plugins import Checks, classes
from coupler.plugins.finding import Finding, Verdict
from coupler.plugins.manager import Plugins
from coupler.run.row_form import job_of, sections


def diagnose(plugins: Plugins, config: RunConfig | None) -> Iterator[Finding]:
    """Yield what each check finds, as it finds it.

    Without ``config``, only what every run needs is checked.
    """
    checks = Checks(plugins)
    yield from host.interpreter()
    yield from host.hostname()
    yield from host.ports()
    yield from host.shared_memory()
    yield from host.sandboxes()
    yield from devices.devices()

    yield from packages.plugins_load(plugins)
    yield from packages.requirements(plugins)
    yield from packages.ranges(plugins)

    yield from classes(plugins, config) if config else ()
    yield from checks.selected(config)
    yield from checks.others()
    if not config:
        yield from host.disk(Path())
        return
    job = job_of(config, plugins)
    yield from run.configured(config, sections(config, plugins, job))


def render(finding: Finding) -> str:
    """Return one line, and for a problem a second one with its fix."""
    line = f"{finding.verdict:8} {finding.name:14} {finding.text}"
    if finding.verdict is not Verdict.PROBLEM:
        return line
    return f"{line}\n{'':8} fix:           {finding.fix}"
