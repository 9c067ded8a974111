"""Lead Hydra's sweeper and launcher through the runs of a sweep."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hydra import initialize
from hydra._internal.callbacks import Callbacks
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from coupler.cli.composing import quoted
from coupler.cli.sweep.one_run import OneRun
from coupler.cli.sweep.space import Space
from coupler.cli.sweep.summary import METRICS, last_value
from coupler.config.schema import Job
from coupler.errors import ConfigError
from coupler.system.files import writing
from coupler.system.tree import nest

# Hydra's name of a configuration that has the swept keys, without values.
CONFIG = "coupler_sweep"
VERSION = "1.3"
DIRECTION = "hydra.sweeper.direction"
MAXIMIZE, MINIMIZE = "maximize", "minimize"


@dataclass(frozen=True, slots=True)
class Task:
    """The function that a launcher calls for each run."""

    run: OneRun
    direction: str

    def __call__(self, _: DictConfig) -> float:
        """Make the run, and return its last reward or loss to the sweeper."""
        record = self.run([*HydraConfig.get().overrides.task])
        value = last_value(self.run.folder / record.name, METRICS[self.run.job])
        if record.code or value is None:
            return float("-inf" if self.direction == MAXIMIZE else "inf")
        return value


def search(space: Space, run: OneRun) -> None:
    """Make the runs that Hydra's sweeper asks for.

    Raises:
        ConfigError: Hydra refuses an option of its own.
    """
    nothing = nest([(each.key, None) for each in space.swept])
    ConfigStore.instance().store(CONFIG, nothing)
    swept = [f"{each.key}={each.text}" for each in space.swept]

    with _refusals_named(space), initialize(None, job_name="coupler", version_base=VERSION):
        loader = GlobalHydra.instance().config_loader()
        wanted = MAXIMIZE if run.job is Job.TRAIN else MINIMIZE
        given = [*_ours(run), *space.of_hydra]
        config = loader.load_configuration(CONFIG, [*given, *swept], RunMode.MULTIRUN)
        if "direction" in config.hydra.sweeper:
            if not any(text.startswith(f"{DIRECTION}=") for text in given):
                given.append(f"{DIRECTION}={wanted}")
                config = loader.load_configuration(CONFIG, [*given, *swept], RunMode.MULTIRUN)
            wanted = str(config.hydra.sweeper.direction)

        sweeper = Plugins.instance().instantiate_sweeper(
            hydra_context=HydraContext(config_loader=loader, callbacks=Callbacks()),
            task_function=Task(run, wanted),
            config=config,
        )
        with writing(f"the sweep in {run.folder}"):
            run.folder.mkdir(parents=True, exist_ok=True)
        sweeper.sweep(swept)


def _ours(run: OneRun) -> list[str]:
    """Return options of Hydra by which it leaves folders and logs to us."""
    return [
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
        "hydra.output_subdir=null",
        "hydra.job.chdir=false",
        f"hydra.sweep.dir={quoted(run.folder)}",
        "hydra.sweep.subdir=.",
    ]


@contextmanager
def _refusals_named(space: Space) -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        text = " ".join(str(error).split())[:300].rstrip(".")
        given = " ".join(space.of_hydra) or "the sweep"
        raise ConfigError(
            f"Hydra refuses {given}: {text}.\n"
            "  try:  without these options, or after installing the plugin of Hydra they name"
        ) from None
