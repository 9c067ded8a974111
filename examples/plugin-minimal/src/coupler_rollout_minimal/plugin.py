"""Declare ``rollout=minimal``; this imports the standard library and coupler only."""

from dataclasses import dataclass

from coupler import Backend, RolloutConfig, hookimpl


@dataclass
class MinimalConfig(RolloutConfig):
    name: str = "minimal"


@hookimpl
def coupler_backends():
    yield Backend(
        kind="rollout",
        name="minimal",
        target="coupler_rollout_minimal.rollout:MinimalRollout",
        config=MinimalConfig,
        capabilities=frozenset({"weights:full"}),
    )
