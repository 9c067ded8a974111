"""Build a rollout replica in the process where it lives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from coupler.interfaces import Model, Rollout
from coupler.system.imports import load_subclass
from coupler.system.plain import Section


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """The description of a replica, which any process can read.

    It holds names and plain configuration, never a class.

    Attributes:
        rollout: ``"package.module:Class"``.
    """

    rollout: str
    config: Any
    model: Model

    def __reduce__(self) -> Any:
        """Cross to another process without the plugin's configuration class."""
        return _received, (self.rollout, Section.of(self.config), self.model)


def _received(rollout: str, section: Section, model: Model) -> RolloutSpec:
    return RolloutSpec(rollout, section.open(), model)


def build(spec: RolloutSpec) -> Rollout:
    """Make one replica, in the process where it lives."""
    return load_subclass(spec.rollout, Rollout)(spec.config, spec.model)
