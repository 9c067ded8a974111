"""Fine-tune on given answers, with the engine, batch and normalisation of
reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coupler.batch import Batch
from coupler.batch.trajectory import columns_of
from coupler.config.schema import RunConfig
from coupler.data import Example, PromptStream
from coupler.interfaces import Algorithm
from coupler.jobs.patience import Patience
from coupler.loop.completing import Provider, complete
from coupler.loop.device_memory import Residency
from coupler.loop.engine_group import EngineGroup
from coupler.loop.state import State
from coupler.loop.step_metrics import Clock, of_steps
from coupler.loop.trainer import TRAINED, OnStep, SkippedSteps


class SupervisedTrainer:
    """Takes ``config.steps`` batches of ``config.prompts_per_step`` rows out of
    ``order``.

    Args:
        pack: makes a Batch of rows.
        providers: compute the columns that the algorithm needs, by their names.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        policy: EngineGroup,
        algorithm: Algorithm,
        order: PromptStream[Any],
        pack: Callable[[Sequence[Any]], Batch],
        providers: Mapping[str, Provider],
        residency: Residency,
        patience: Patience,
    ) -> None:
        self.config, self.policy, self.algorithm = config, policy, algorithm
        self.order, self.pack, self.providers = order, pack, providers

        self.residency, self.patience = residency, patience
        self.skips = SkippedSteps(config.max_skipped_steps)

    async def fit(self, on_step: OnStep, done: int = 0) -> None:
        """Train the steps after ``done``, and give their metrics to ``on_step``.

        They end where the patience is over.
        """
        for step in range(done + 1, self.config.steps + 1):
            if self.patience.over:
                return
            clock = Clock()
            rows = [self.order.rows[self.order.next()] for _ in range(self.config.prompts_per_step)]
            async with clock("time/complete"):
                batch = await complete(self.pack(rows), self.config, self.algorithm, self.providers)
                batch = self.algorithm.advantages(batch)

            async with clock("time/train"), self.residency("train", {"policy": TRAINED}):
                trained = await self.policy.train(
                    batch, self.config.optimizer_steps_per_batch, None
                )
            self.skips.count(trained.steps)

            metrics = {**trained.metrics, **of_steps(trained.steps), **clock.metrics(batch)}
            await on_step(step, metrics)

    def state(self) -> State:
        """Return the state of the run between two steps."""
        return State(
            {
                "order": self.order.state(),
                "skipped": self.skips.in_a_row,
                "patience": self.patience.state(),
            }
        )

    def restore(self, state: State, *, reset_data: bool = False) -> None:
        """Go on from ``state``, with ``reset_data`` from the first row of the data."""
        if not reset_data:
            self.order.restore(state.plain["order"])
        self.skips.in_a_row = state.plain["skipped"]
        if "patience" in state.plain:  # an earlier release had none
            self.patience.restore(state.plain["patience"])

    def start_at(self, step: int) -> None:
        """Begin after ``step`` of another run, which needs nothing here."""

    @property
    def healthy(self) -> bool:
        """Return whether the last gradient was finite."""
        return not self.skips.in_a_row


def pack(examples: Sequence[Example]) -> Batch:
    """Make one Batch of supervised examples, each of which is a unit of its own.

    The column ``weight`` [B] is there where an example has another weight than 1.
    """
    columns = columns_of([example.trajectory for example in examples])
    weights = np.array([example.weight for example in examples], np.float32)
    return Batch(
        lengths=np.array([len(example) for example in examples], np.int64),
        tokens={name: columns[name] for name in ("tokens", "loss_mask")},
        seqs={
            "unit": np.arange(len(examples), dtype=np.int64),
            **({"weight": weights} if (weights != 1).any() else {}),
        },
    )
