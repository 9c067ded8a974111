"""Declare the environments of this distribution."""

from __future__ import annotations

from collections.abc import Iterable

from coupler import RunConfig
from coupler.plugins import Backend, Kind, hookimpl
from coupler.plugins.finding import Finding
from coupler_agents.gymnasium.config import GymnasiumConfig
from coupler_agents.openenv.config import OpenEnvConfig
from coupler_agents.program.config import ProgramConfig
from coupler_agents.tools.config import ToolsConfig
from coupler_agents.verifiers.config import VerifiersConfig


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

    yield Backend(
        kind=Kind.ENVIRONMENT,
        name="gymnasium",
        target="coupler_agents.gymnasium.environment:GymnasiumEnvironment",
        config=GymnasiumConfig,
    )

    yield Backend(
        kind=Kind.ENVIRONMENT,
        name="verifiers",
        target="coupler_agents.verifiers.environment:VerifiersEnvironment",
        config=VerifiersConfig,
    )

    yield Backend(
        kind=Kind.ENVIRONMENT,
        name="openenv",
        target="coupler_agents.openenv.environment:OpenEnvEnvironment",
        config=OpenEnvConfig,
    )


@hookimpl
def coupler_doctor(config: RunConfig | None) -> Iterable[Finding]:
    """Check the sandbox of programs, if the run has the tool python."""
    environment = config.environment if config else None
    if not isinstance(environment, ToolsConfig) or "python" not in environment.builtin:
        return []
    from coupler_agents.doctor import findings

    return findings(environment)
