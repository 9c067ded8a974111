"""Subtract from a reward the moving mean of those of its kind: Role-conditioned
Advantage Estimation of SPIRAL (arXiv 2506.24119), where a ``data_source`` names a game
and the side that was played.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import of_policy
from coupler.interfaces import Controller
from coupler.metrics import Metric, Metrics
from coupler_algos.config import GRPOConfig
from coupler_algos.shaping import scores

MOVING_MEAN = "moving_mean"
"""The column [B] float64 of the baseline that a controller put in force."""


class MovingMeans(Controller):
    """Keep a moving mean of rewards for each ``data_source``, from 0 on.

    A trajectory with reward R makes it ``decay * mean + (1 - decay) * R``, in the order
    of the batch. A batch is compared with the means of the batches before it.
    """

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config
        self.means: dict[str, float] = {}

    def apply(self, batch: Batch) -> Batch:
        """Add ``moving_mean`` [B]."""
        sources = batch["data_source"].tolist()
        means = np.array(
            [self.means.get(source, 0.0) for source in sources],
            np.float64,
        )
        return batch.with_seqs(**{MOVING_MEAN: means})

    def update(self, batch: Batch) -> Metrics:
        """Move the means by the rewards of the samples in ``batch``.

        Returns:
            The mean over trajectories of what was subtracted.
        """
        batch = of_policy(batch)
        first, _ = batch.trajectories()
        sources = batch["data_source"][first].tolist()
        rewards = scores(self.config, batch).tolist()
        for source, reward in zip(sources, rewards, strict=True):
            self._move(source, reward)

        used = batch[MOVING_MEAN][first]
        total = float(used.sum())
        return {"baseline/moving_mean": Metric(total, len(used))}

    def _move(self, source: str, reward: float) -> None:
        mean = self.means.get(source, 0.0)
        share = 1 - self.config.baseline_decay
        self.means[source] = mean + share * (reward - mean)

    def state(self) -> dict[str, float]:
        """Return the mean of each source."""
        return dict(self.means)

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue with the means of :meth:`state`."""
        self.means = {source: float(mean) for source, mean in state.items()}


def moving_mean(batch: Batch) -> np.ndarray:
    """Return [N] what is subtracted from the reward of each trajectory.

    It is 0 without a controller, as it is before the first batch.
    """
    first, _ = batch.trajectories()
    if not batch.has(MOVING_MEAN):
        return np.zeros(len(first))
    return batch[MOVING_MEAN][first]
