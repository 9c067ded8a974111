"""Declare the options of each tracker: ``tracker.NAME.key``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class WandbMode(StrEnum):
    """The place that a run of Weights & Biases goes to."""

    ONLINE = "online"
    OFFLINE = "offline"


class SwanlabMode(StrEnum):
    """The place that a run of SwanLab goes to."""

    ONLINE = "online"
    OFFLINE = "offline"


@dataclass
class TensorboardConfig:
    """Options of ``tracker.tensorboard``."""

    name: str = "tensorboard"
    """The name of the tracker, which nothing changes."""
    folder: str = ""
    """The folder of the event files; empty is tensorboard in the folder of the run."""


@dataclass
class WandbConfig:
    """Options of ``tracker.wandb``."""

    name: str = "wandb"
    """The name of the tracker, which nothing changes; run_name names the run."""
    project: str = "coupler"
    """The project that the run is in."""
    entity: str = ""
    """The user or team that owns the project; empty is the one that is logged in."""
    run_name: str = ""
    """The name of the run; empty is the name of its folder."""
    group: str = ""
    """The group of runs that the run belongs to."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run."""
    mode: WandbMode = WandbMode.ONLINE
    """Send the run to the server (online), or write it to wandb in the folder of the
    run, for wandb sync (offline)."""


@dataclass
class MlflowConfig:
    """Options of ``tracker.mlflow``."""

    name: str = "mlflow"
    """The name of the tracker, which nothing changes; run_name names the run."""
    uri: str = ""
    """The tracking server, such as http://host:5000; empty is MLFLOW_TRACKING_URI, and
    without it mlflow/mlflow.db in the folder of the run."""
    experiment: str = "coupler"
    """The experiment that the run is in; it is made where it is missing."""
    run_name: str = ""
    """The name of the run; empty is the name of its folder."""
    tags: dict[str, str] = field(default_factory=dict)
    """Tags of the run."""


@dataclass
class TrackioConfig:
    """Options of ``tracker.trackio``."""

    name: str = "trackio"
    """The name of the tracker, which nothing changes; run_name names the run."""
    project: str = "coupler"
    """The project that the run is in."""
    run_name: str = ""
    """The name of the run; empty is the name of its folder and its id."""
    folder: str = ""
    """The folder of the database; empty is trackio in the folder of the run."""
    space: str = ""
    """A Space of Hugging Face that the run is sent to, such as USER/NAME."""


@dataclass
class SwanlabConfig:
    """Options of ``tracker.swanlab``."""

    name: str = "swanlab"
    """The name of the tracker, which nothing changes; run_name names the run."""
    project: str = "coupler"
    """The project that the run is in."""
    workspace: str = ""
    """The workspace that owns the project; empty is that of who is logged in."""
    run_name: str = ""
    """The name of the run; empty is the name of its folder."""
    tags: list[str] = field(default_factory=list)
    """Tags of the run."""
    mode: SwanlabMode = SwanlabMode.ONLINE
    """Send the run to the server (online), or write it to swanlab in the folder of the
    run, for swanlab sync (offline)."""
