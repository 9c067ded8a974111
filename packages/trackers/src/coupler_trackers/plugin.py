"""Declare the trackers of this package. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable

from coupler import Backend, hookimpl
from coupler_trackers.config import (
    MlflowConfig,
    SwanlabConfig,
    TensorboardConfig,
    TrackioConfig,
    WandbConfig,
)

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
