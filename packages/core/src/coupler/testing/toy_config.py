"""Declare the toy backends: engine, rollout, algorithm and environment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from coupler.engine_kit.adamw import AdamWConfig
from coupler.interfaces import RolloutConfig, no_effect
from coupler.plugins import Backend, hookimpl
from coupler.testing.toy_environment import ToyEnvironmentConfig


@dataclass
class ToyEngineConfig(AdamWConfig):
    name: str = "toy"
    max_tokens_per_gpu: int = no_effect(1024)
    """The most tokens that one micro-batch of a rank has."""
    lr: float = 0.05

    @property
    def micro_batch_limit(self) -> tuple[str, int]:
        return "max_tokens_per_gpu", self.max_tokens_per_gpu


@dataclass
class ToyRolloutConfig(RolloutConfig):
    name: str = "toy"


@dataclass
class ToyAlgorithmConfig:
    name: str = "toy"
    """The name of the algorithm, chosen by algorithm=NAME."""


BACKENDS = (
    Backend(
        kind="engine",
        name="toy",
        target="coupler.testing.toy:ToyEngine",
        config=ToyEngineConfig,
        capabilities=frozenset(
            {
                "weights:full",
                "model:toy",
                "world:1",
                "output:values",
                "output:topk",
                "input:sampling_mask",
            }
        ),
    ),
    Backend(
        kind="rollout",
        name="toy",
        target="coupler.testing.toy:ToyRollout",
        config=ToyRolloutConfig,
        capabilities=frozenset(
            {
                "weights:full",
                "model:own_weights",
                "model:toy",
                "sampling:top_p",
                "output:sampling_mask",
                "in_flight:abort",
                "in_flight:recompute",
                "in_flight:stale_kv",
            }
        ),
    ),
    Backend(
        kind="algorithm",
        name="toy",
        target="coupler.testing.toy:ToyAlgorithm",
        config=ToyAlgorithmConfig,
        capabilities=frozenset({"model:toy"}),
    ),
    Backend(
        kind="environment",
        name="toy",
        target="coupler.testing.toy_environment:ToyEnvironment",
        config=ToyEnvironmentConfig,
    ),
)


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    return BACKENDS
