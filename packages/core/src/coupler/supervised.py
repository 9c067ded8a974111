"""SupervisedTrainer: supervised fine-tuning on the same Engine, batch and normalisation as reinforcement learning."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from coupler.batch import Batch
from coupler.config.schema import RunConfig
from coupler.interfaces import Algorithm
from coupler.seeding import stream
from coupler.trainer import Clock, OnStep, SkippedSteps, of_steps
from coupler.trajectory import Trajectory
from coupler.workers import WorkerGroup

BatchSource = Callable[[], Batch]


class SupervisedTrainer:
    """Takes ``config.steps`` batches of ``config.prompts_per_step`` rows, in a new order every epoch."""

    def __init__(
        self,
        config: RunConfig,
        *,
        policy: WorkerGroup,
        algorithm: Algorithm,
        examples: Sequence[Trajectory],
        on_step: OnStep,
    ) -> None:
        self.config, self.policy, self.algorithm, self.on_step = config, policy, algorithm, on_step
        self.examples = examples
        self.skips = SkippedSteps(config.max_skipped_steps)

    async def fit(self) -> None:
        order = self._order()
        for step in range(1, self.config.steps + 1):
            clock = Clock()
            rows = [self.examples[next(order)] for _ in range(self.config.prompts_per_step)]
            batch = self.algorithm.advantages(pack(rows))
            async with clock("time/train"):
                trained = await self.policy.train(batch, self.config.optimizer_steps_per_batch, None)
            self.skips.count(trained.steps)
            await self.on_step(step, {**trained.metrics, **of_steps(trained.steps), **clock.metrics(batch)})

    def _order(self):  # type: ignore[no-untyped-def]
        epoch = 0
        while True:
            indices = np.arange(len(self.examples))
            if self.config.data.shuffle:
                indices = stream(self.config.seed, "supervised", epoch).permutation(indices)
            yield from indices.tolist()
            epoch += 1


def pack(examples: Sequence[Trajectory]) -> Batch:
    """One Batch of supervised examples; every row is its own group and unit."""
    columns = [example.columns() for example in examples]
    return Batch(
        lengths=np.array([len(example) for example in examples], np.int64),
        tokens={name: np.concatenate([c[name] for c in columns]) for name in ("tokens", "loss_mask")},
        seqs={"unit": np.arange(len(examples), dtype=np.int64)},
    )
