"""Declare the trackers of this package. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from coupler import Backend, RunConfig, hookimpl
from coupler_trackers.config import (
    MlflowConfig,
    SwanlabConfig,
    TensorboardConfig,
    TrackioConfig,
    WandbConfig,
)
from coupler_trackers.library import missing

CONFIGS = {
    "tensorboard": TensorboardConfig,
    "wandb": WandbConfig,
    "mlflow": MlflowConfig,
    "trackio": TrackioConfig,
    "swanlab": SwanlabConfig,
}


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    for name, config in CONFIGS.items():
        target = f"coupler_trackers.{name}:{name.title()}Tracker"
        yield Backend(kind="tracker", name=name, target=target, config=config)


@hookimpl
def coupler_validate(config: RunConfig) -> Iterable[str]:
    named = [name for name in config.trackers if name in CONFIGS]
    return [problem for name in named if (problem := missing(name))]
