"""Compare the log-probs of engine and rollouts on tokens sampled for that alone."""

from __future__ import annotations

import numpy as np

from coupler.batch import Batch
from coupler.interfaces import (
    Completion,
    DeviceTurns,
    EngineSide,
    Output,
    Request,
    RolloutSide,
)
from coupler.metrics import Metrics
from coupler.worker.train_infer import differences

PROBE_TOKENS = 16


def largest(compared: list[Metrics]) -> float:
    """Return the mean |log-prob difference| of the replica that differs most.

    It is NaN if that of any replica is NaN.
    """
    return float(np.max([metrics["train_infer/abs_diff"].value for metrics in compared]))


class SyncProbe:
    """Samples a few tokens on every replica, and scores them with the engine."""

    def __init__(
        self,
        engine: EngineSide,
        rollouts: RolloutSide,
        residency: DeviceTurns,
        prompt: tuple[int, ...],
        temperature: float,
    ) -> None:
        self.engine, self.rollouts, self.residency = engine, rollouts, residency
        self.prompt, self.temperature = prompt, temperature

    async def mean_difference(self) -> float:
        """Return the mean |log-prob difference| between the engine and the replica that
        differs most.
        """
        return largest(await self.replicas())

    async def replicas(self) -> list[Metrics]:
        """Return ``train_infer/*`` of every replica, on tokens that it samples now."""
        request = Request(self.prompt, PROBE_TOKENS, self.temperature, (), seed=0)
        async with self.residency.generating("prove"):
            sampled = await self.rollouts.sample_on_each(request)
        # the rollout's weights stay, because nothing would bring them back
        async with self.residency.syncing("prove"):
            return [await self._differences(request, done) for done in sampled]

    async def _differences(self, request: Request, done: Completion) -> Metrics:
        """Return ``train_infer/*`` of one completion."""
        ids = np.array([*request.prompt, *done.tokens], np.int32)
        mask = np.arange(len(ids)) >= len(request.prompt)
        batch = Batch(
            np.array([len(ids)]),
            {"tokens": ids, "loss_mask": mask},
            {"temperature": np.array([self.temperature], np.float32)},
        )
        ours = (await self.engine.forward(batch, (Output("logprobs"),)))["logprobs"]
        return differences(ours[mask] - np.array(done.logprobs), len(done.tokens))
