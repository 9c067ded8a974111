"""Decide how many optimizer steps each trained role takes, and on which columns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import OF_ENGINES, OF_RECORDS
from coupler.config.schema import OnSync, RunConfig

# column: the policy's log-probs before its first step on a batch
OLD_LOGPROBS = "old_logprobs"


@dataclass(frozen=True, slots=True)
class Turn:
    """The arguments of :meth:`EngineGroup.train` for one role in one step."""

    batch: Batch
    num_steps: int
    version: int | None
    epochs: int


def turns_of(
    config: RunConfig, roles: Collection[str], step: int, batch: Batch, version: int
) -> dict[str, Turn]:
    """Return the turns of the trained ``roles`` at ``step``.

    Args:
        version: of the weights that train on ``batch``.
    """
    turns, batch = {}, batch.without(*OF_RECORDS)
    if config.sync.in_flight is OnSync.STALE_KV:
        batch = by_cache(batch)

    if step > warmup_steps(config, "critic" in roles):
        own = batch.without(OLD_LOGPROBS) if takes_one_step(config) else batch
        turns["policy"] = Turn(
            own, config.optimizer_steps_per_batch, version, config.epochs_per_batch
        )
    if "critic" in roles:
        # nothing samples from a critic, so its weights have no version
        judged = batch.without(*OF_ENGINES)
        turns["critic"] = Turn(
            judged, critic_steps_per_batch(config), None, config.epochs_per_batch
        )
    return turns


def by_cache(batch: Batch) -> Batch:
    """Give every sampled token the oldest ``version`` of its row.

    A completion that goes on with its cache reads keys and values of those weights, so
    that the newer ones do not know its log-probs.
    """
    version = batch["version"]
    sampled = version >= 0
    newest = np.iinfo(version.dtype).max
    known = np.where(sampled, version, newest)
    first = batch.starts[:-1]
    oldest = batch.spread(np.minimum.reduceat(known, first))
    return batch.with_tokens(version=np.where(sampled, oldest, version))


def takes_one_step(config: RunConfig) -> bool:
    """Tell if the policy takes one optimizer step a batch.

    Its loss then gets no old log-probs: its own are the same, without the rounding of
    another pass.
    """
    return config.optimizer_steps_per_batch * config.epochs_per_batch == 1


def optimizer_steps(config: RunConfig, has_critic: bool) -> dict[str, int]:
    """Return how many each trained role takes over the whole run."""
    batches = max(config.steps - warmup_steps(config, has_critic), 0)
    epochs = config.epochs_per_batch
    steps = {"policy": batches * config.optimizer_steps_per_batch * epochs}
    if has_critic:
        steps["critic"] = config.steps * critic_steps_per_batch(config) * epochs
    return steps


def critic_steps_per_batch(config: RunConfig) -> int:
    """Return the optimizer steps that the critic takes in each epoch of a batch."""
    return config.critic.optimizer_steps_per_batch or config.optimizer_steps_per_batch


def warmup_steps(config: RunConfig, has_critic: bool) -> int:
    """Return how many first steps train the critic only."""
    return config.critic.warmup_steps if has_critic else 0
