"""Define the options of ``environment=verifiers``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coupler import EnvironmentConfig


@dataclass
class VerifiersConfig(EnvironmentConfig):
    """Options of an environment that verifiers runs."""

    name: str = "verifiers"
    env: dict[str, Any] = field(default_factory=dict)
    """The environment as verifiers describes it, which is its [env] block: taskset, and
    for each role harness and runtime."""
    renderer_model: str = ""
    """The folder of the model. With it, verifiers turns messages into ids itself and
    samples after ids. Without it, the gateway does, as in other environments."""
    uses_tools: bool = True
    """Prove the chat template with tools before the run starts; set it to false for an
    agent that offers none, where the template knows no tools."""
    concurrency: int = field(default=64, metadata={"ge": 1})
    """The most episodes that run at once."""
