"""Refuse demonstrations that a run cannot show."""

from __future__ import annotations

from coupler.batch.columns import DEMONSTRATION
from coupler.config.schema import Job, RouterReplay, RunConfig
from coupler.errors import ConfigError


def check_demonstrations(config: RunConfig, needs: frozenset[str], job: Job) -> None:
    """Refuse options that answers of rows do not go with.

    Raises:
        ConfigError: there is one. The message names it.
    """
    if DEMONSTRATION not in needs or job is not Job.TRAIN:
        return

    what = f"algorithm={config.algorithm.name} as it is set learns from answers of the rows"
    if config.environment:
        raise ConfigError(
            f"{what}, and environment={config.environment.name} has turns in their place.\n"
            "  try:  rows without such parts of the loss, or no environment"
        )
    if config.router_replay is RouterReplay.R3:
        raise ConfigError(
            f"{what}, which no rollout sends to experts: router_replay=R3 has nothing to replay.\n"
            "  try:  router_replay=disabled, or R2"
        )
