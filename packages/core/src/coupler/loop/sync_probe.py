"""Compare the log-probs of engine and rollouts on tokens sampled for that alone."""

from __future__ import annotations

from dataclasses import dataclass

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
# What rounding may add to the log-prob of a token that is certain.
ROUNDING = 0.01


@dataclass(frozen=True, slots=True)
class Compared:
    """The log-probs of both sides on the tokens that one replica sampled."""

    done: Completion
    engine: np.ndarray  # [n]
    rollout: np.ndarray  # [n]

    @property
    def metrics(self) -> Metrics:
        """Return ``train_infer/*``."""
        return differences(self.engine - self.rollout, len(self.engine))

    @property
    def difference(self) -> float:
        """Return the mean |log-prob difference|."""
        return float(np.abs(self.engine - self.rollout).mean())

    @property
    def spread(self) -> float:
        """Return how far log-probs are from their median.

        It is 0 for a model that is sure of every token, or of none. Whatever weights a
        replica runs, it may then agree.
        """
        return float(np.abs(self.engine - np.median(self.engine)).mean())

    def same_answer(self, other: Compared) -> bool:
        """Return whether the replica gave the same tokens and log-probs."""
        same = self.done.tokens == other.done.tokens
        return same and bool(np.array_equal(self.rollout, other.rollout))


def largest(compared: list[Compared]) -> float:
    """Return the mean |log-prob difference| of the replica that differs most.

    It is NaN if that of any replica is NaN.
    """
    return float(np.max([one.difference for one in compared]))


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

    async def replicas(self) -> list[Compared]:
        """Compare both sides on tokens that every replica samples now."""
        request = Request(self.prompt, PROBE_TOKENS, self.temperature, (), seed=0)
        async with self.residency.generating("prove"):
            sampled = await self.rollouts.sample_on_each(request)
        # the rollout's weights stay, because nothing would bring them back
        async with self.residency.syncing("prove"):
            return [
                Compared(done, await self._scored(done, self.temperature), np.array(done.logprobs))
                for done in sampled
            ]

    async def _scored(self, done: Completion, temperature: float) -> np.ndarray:
        """Return the engine's [n] log-probs of a completion."""
        ids = np.array([*self.prompt, *done.tokens], np.int32)
        mask = np.arange(len(ids)) >= len(self.prompt)
        batch = Batch(
            np.array([len(ids)]),
            {"tokens": ids, "loss_mask": mask},
            {"temperature": np.array([temperature], np.float32)},
        )
        return (await self.engine.forward(batch, (Output("logprobs"),)))["logprobs"][mask]

    async def cause(self, one: Compared, before: Compared | None, limit: float) -> str:
        """Say which side is wrong where both differ on ``one``, if that can be told.

        Args:
            before: what the replica answered with altered weights.
        """
        for side, found in (("rollout", one.rollout), ("engine", one.engine)):
            if not np.isfinite(found).all() or found.max() > ROUNDING:
                return f"the {side} is wrong: its log-probs are not finite, or above 0"
        if before is not None and one.same_answer(before):
            return (
                "the rollout answers the same after altered weights and after the true ones: it "
                "loads none of them, or the transport brings none"
            )

        if self.temperature != 1:
            async with self.residency.syncing("prove"):
                plain = await self._scored(one.done, 1.0)
            if float(np.abs(plain - one.rollout).mean()) <= limit:
                return "the rollout is wrong: it reports log-probs of temperature 1"
            if one.spread > limit and np.abs(plain - one.engine).max() < ROUNDING * limit:
                return "the engine is wrong: its log-probs do not depend on the temperature"
        return (
            "engine and rollout compute different log-probs, or the transport changes weights; "
            "this proof cannot tell which"
        )
