"""Turns: how many optimizer steps each trained role takes, and on what."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from coupler.batch import Batch
from coupler.batch.columns import ROUTED_EXPERTS
from coupler.config.schema import RunConfig

OLD_LOGPROBS = "old_logprobs"  # column: the policy's log-probs before its first step on a batch


@dataclass(frozen=True, slots=True)
class Turn:
    """What one role trains on in one step: arguments of :meth:`EngineGroup.train`."""

    batch: Batch
    num_steps: int
    version: int | None
    epochs: int


def turns_of(config: RunConfig, roles: Collection[str], step: int, batch: Batch, version: int) -> dict[str, Turn]:
    """The turns of the trained ``roles`` at ``step``, whose batch the weights of ``version`` train on."""
    turns = {}
    if step > warmup_steps(config, "critic" in roles):
        own = batch.without(OLD_LOGPROBS) if takes_one_step(config) else batch
        turns["policy"] = Turn(own, config.optimizer_steps_per_batch, version, config.epochs_per_batch)
    if "critic" in roles:  # it has no version: nothing samples from it
        judged = batch.without(ROUTED_EXPERTS)
        turns["critic"] = Turn(judged, critic_steps_per_batch(config), None, config.epochs_per_batch)
    return turns


def takes_one_step(config: RunConfig) -> bool:
    """Tell if the policy takes one optimizer step a batch.

    Its loss then gets no old log-probs: its own are the same, without the rounding of
    another pass.
    """
    return config.optimizer_steps_per_batch * config.epochs_per_batch == 1


def optimizer_steps(config: RunConfig, has_critic: bool) -> dict[str, int]:
    """How many each trained role takes over the whole run."""
    batches, epochs = config.steps - warmup_steps(config, has_critic), config.epochs_per_batch
    critic = {"critic": config.steps * critic_steps_per_batch(config) * epochs} if has_critic else {}
    return {"policy": max(batches, 0) * config.optimizer_steps_per_batch * epochs, **critic}


def critic_steps_per_batch(config: RunConfig) -> int:
    """Optimizer steps that the critic takes in each epoch of a batch."""
    return config.critic.optimizer_steps_per_batch or config.optimizer_steps_per_batch


def warmup_steps(config: RunConfig, has_critic: bool) -> int:
    """How many first steps train the critic only."""
    return config.critic.warmup_steps if has_critic else 0
