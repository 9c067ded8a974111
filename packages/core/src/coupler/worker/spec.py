"""Define the parts of an engine rank, its mini-batches and its answers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from coupler.batch import Batch
from coupler.interfaces import Algorithm, Model, StepInfo, StepResult
from coupler.metrics import Metrics
from coupler.system.imports import load_subclass
from coupler.system.plain import Section
from coupler.worker.torch.profiling import NOTHING, Profile


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The description of a rank, which any process can read.

    It holds names and plain configuration, never a class.

    Attributes:
        engine: ``"package.module:Class"``.
        algorithm: ``("package.module:Class", its config)``, or None for a role that is
            not trained.
    """

    role: str
    engine: str
    engine_config: Any
    model: Model
    algorithm: tuple[str, Any] | None
    profile: Profile = NOTHING

    def sent(self) -> dict[str, Any]:
        """Return the fields without the plugins' configuration classes."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["engine_config"] = Section.of(self.engine_config)
        if self.algorithm is not None:
            values["algorithm"] = (self.algorithm[0], Section.of(self.algorithm[1]))
        return values

    @classmethod
    def received(cls, values: dict[str, Any]) -> WorkerSpec:
        """Undo :meth:`sent`, in another process."""
        values["engine_config"] = values["engine_config"].open()
        if values["algorithm"] is not None:
            values["algorithm"] = (values["algorithm"][0], values["algorithm"][1].open())
        return cls(**values)

    def __reduce__(self) -> Any:
        return WorkerSpec.received, (self.sent(),)


def build_algorithm(spec: WorkerSpec) -> Algorithm | None:
    """Make the algorithm of a role, if the role is trained."""
    if spec.algorithm is None:
        return None
    target, config = spec.algorithm
    return load_subclass(target, Algorithm)(config)


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One rank's part of one optimizer step.

    Attributes:
        fresh_version: version of the weights that compute the step, or None once an
            earlier step of the batch has changed them.
        num_replicas: rollout replicas that sampled the batch.
    """

    batch: Batch
    info: StepInfo
    fresh_version: int | None
    num_replicas: int = 1


@dataclass(frozen=True, slots=True)
class Trained:
    """The outcome of :meth:`EngineGroup.train`."""

    metrics: Metrics
    steps: tuple[StepResult, ...]
