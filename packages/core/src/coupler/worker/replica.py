"""What a rollout replica is built from, in the process where it lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coupler.config.plain import Section
from coupler.interfaces import Model, Rollout
from coupler.system.imports import resolve


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """What a replica is built from, in any process: names and plain config, never a class."""

    rollout: str  # "package.module:Class"
    config: Any
    model: Model

    def __reduce__(self) -> Any:
        """Cross to another process without the plugin's configuration class."""
        return _received, (self.rollout, Section.of(self.config), self.model)


def _received(rollout: str, section: Section, model: Model) -> RolloutSpec:
    return RolloutSpec(rollout, section.open(), model)


def build(spec: RolloutSpec) -> Rollout:
    """Make one replica, in the process where it lives."""
    return resolve(spec.rollout)(spec.config, spec.model)
