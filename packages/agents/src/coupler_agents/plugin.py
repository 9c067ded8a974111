"""Declare the environments of this distribution."""

from __future__ import annotations

from collections.abc import Iterable

from coupler import RunConfig
from coupler.plugins import Backend, Kind, hookimpl
from coupler.plugins.finding import Finding
from coupler_agents.program.config import ProgramConfig
from coupler_agents.tools.config import ToolsConfig


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    yield Backend(
        kind=Kind.ENVIRONMENT,
        name="tools",
        target="coupler_agents.tools.environment:ToolEnvironment",
        config=ToolsConfig,
    )

    yield Backend(
        kind=Kind.ENVIRONMENT,
        name="program",
        target="coupler_agents.program.environment:ProgramEnvironment",
        config=ProgramConfig,
    )


@hookimpl
def coupler_doctor(config: RunConfig | None) -> Iterable[Finding]:
    """Check the sandbox of programs, if the run has the tool python."""
    environment = config.environment if config else None
    if not isinstance(environment, ToolsConfig) or "python" not in environment.builtin:
        return []
    from coupler_agents.doctor import findings

    return findings(environment)
