"""What an engine rank is built from, what it trains on and what it answers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from coupler.batch import Batch
from coupler.config.plain import Section
from coupler.interfaces import (
    Algorithm,
    Model,
    StepInfo,
    StepResult,
)
from coupler.metrics import Metrics
from coupler.system.imports import resolve
from coupler.worker.torch.profiling import NOTHING, Profile


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a rank is built from, in any process: names and plain config, never a class."""

    role: str
    engine: str  # "package.module:Class"
    engine_config: Any
    model: Model
    algorithm: tuple[str, Any] | None  # ("package.module:Class", its config); None for a role that is not trained
    profile: Profile = NOTHING

    def __reduce__(self) -> Any:
        """Cross to another process without the plugins' configuration classes."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["engine_config"] = Section.of(self.engine_config)
        if self.algorithm is not None:
            values["algorithm"] = (self.algorithm[0], Section.of(self.algorithm[1]))
        return _received, (values,)


def _received(values: dict[str, Any]) -> WorkerSpec:
    values["engine_config"] = values["engine_config"].open()
    if values["algorithm"] is not None:
        values["algorithm"] = (values["algorithm"][0], values["algorithm"][1].open())
    return WorkerSpec(**values)


def build_algorithm(spec: WorkerSpec) -> Algorithm | None:
    if spec.algorithm is None:
        return None
    target, config = spec.algorithm
    return resolve(target)(config)


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One rank's part of one optimizer step."""

    batch: Batch
    info: StepInfo
    fresh_version: int | None  # the weights are those of this version; None once the step before has changed them
    num_replicas: int = 1  # that sampled the batch


@dataclass(frozen=True, slots=True)
class Trained:
    """What :meth:`EngineGroup.train` did."""

    metrics: Metrics
    steps: tuple[StepResult, ...]
