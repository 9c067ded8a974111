"""Refuse models that are to be asked about episodes, and cannot be."""

from __future__ import annotations

from coupler.config.compose import GIVES_VALUES
from coupler.config.schema import Job, RunConfig
from coupler.errors import ConfigError
from coupler.plugins.manager import Plugins


def check_opinions(config: RunConfig, plugins: Plugins, job: Job) -> None:
    """Refuse a reward model or a judge that this run cannot ask.

    Raises:
        ConfigError: it cannot. The message names the option.
    """
    if job is Job.SFT:
        return
    if config.reward_model.model.path:
        _check_classifier(config, plugins)
    if config.reward_model.model.path and config.judge.model.path and not config.reward.target:
        raise ConfigError(
            "reward_model.model.path and judge.model.path are both set, and reward.target is "
            "empty: which of both is the reward?\n"
            "  try:  reward.target=file.py:function, which gets score and verdict, or one model "
            "alone"
        )


def _check_classifier(config: RunConfig, plugins: Plugins) -> None:
    engine = config.reward_model.engine
    if GIVES_VALUES in plugins.get("engine", engine.name).capabilities_of(engine):
        return
    able = [
        name
        for name, backend in plugins.declared("engine").items()
        if GIVES_VALUES in backend.capabilities
    ]
    raise ConfigError(
        f"reward_model.engine={engine.name} does not compute the score of a classifier "
        f"({GIVES_VALUES}).\n"
        f"  try:  engine@reward_model.engine set to one of {', '.join(sorted(able))}"
    )
