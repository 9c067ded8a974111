"""Adapt the KL coefficient so that the divergence stays near a target.

The method is that of Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import of_policy
from coupler.interfaces import Controller
from coupler.metrics import Metric, Metrics
from coupler_algos.config import PolicyConfig
from coupler_algos.kl import KL_COEF
from coupler_algos.shaping import kl_per_token

MAX_ERROR = 0.2
"""The paper's clip of the proportional error."""


class AdaptiveKL(Controller):
    """Multiply the coefficient after every batch, by how far its KL is from the target.

    After n trajectories the factor is
    ``1 + clip(KL / target - 1, -0.2, 0.2) * n / horizon``.

    KL is the mean over trajectories of the sum over their tokens, in nats, by
    ``kl_estimator``. A horizon that could make the factor 0 or negative is refused
    before the run.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self.config, self.value = config, config.kl_coef

    def apply(self, batch: Batch) -> Batch:
        """Add ``kl_coef`` [B] float32."""
        return batch.with_seqs(**{KL_COEF: np.full(len(batch), self.value, np.float32)})

    def update(self, batch: Batch) -> Metrics:
        """Adapt to the divergence of the samples in ``batch``.

        Returns:
            The divergence, and the coefficient that was in force for this batch.
        """
        batch = of_policy(batch)
        number = len(batch.trajectories()[0])
        total = float(kl_per_token(self.config, batch).sum())
        used = self.value

        mean = total / max(number, 1)
        error = float(np.clip(mean / self.config.kl_target - 1, -MAX_ERROR, MAX_ERROR))
        self.value *= 1 + error * number / self.config.kl_horizon
        return {"kl/coef": Metric(used), "kl/trajectory": Metric(total, number)}

    def state(self) -> dict[str, float]:
        """Return the coefficient."""
        return {"value": self.value}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue with the coefficient of :meth:`state`."""
        self.value = float(state["value"])
