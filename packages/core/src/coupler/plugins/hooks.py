"""Specify the hooks of plugins.

Every hook runs on the controller, before or between steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

from coupler.plugins.backend import Backend

if TYPE_CHECKING:
    from coupler.config.schema import RunConfig
    from coupler.plugins.finding import Finding

hookspec = pluggy.HookspecMarker("coupler")
hookimpl = pluggy.HookimplMarker("coupler")


@hookspec
def coupler_backends() -> Iterable[Backend]:  # type: ignore[empty-body]
    """Declare the backends of this distribution. Import nothing heavy."""


@hookspec
def coupler_config_paths() -> Iterable[str]:  # type: ignore[empty-body]
    """Name packages of YAML presets, for example ``"coupler_engine_acme.conf"``."""


@hookspec
def coupler_validate(config: RunConfig) -> Iterable[str] | None:
    """Return problems with the composed config, one sentence each with key and fix.
    Runs before any device is taken.
    """


@hookspec(firstresult=True)
def coupler_weight_path(
    engine: Backend, rollout: Backend, transports: Mapping[str, Backend], config: RunConfig
) -> tuple[str, str] | None:
    """Choose (format, name of a transport) for this pair, or None to let the next
    plugin answer. Core answers last.
    """


@hookspec
def coupler_step_end(step: int, values: Mapping[str, float]) -> Any:
    """Observe a finished step. Must not block."""


@hookspec
def coupler_doctor(config: RunConfig | None) -> Iterable[Finding]:  # type: ignore[empty-body]
    """Check what this plugin needs beyond its requirements.

    ``config`` is None where the user gave none, or one that selects nothing of this
    plugin. The check then runs in a process of its own.
    """
