"""A KL coefficient that keeps the divergence from the reference near a target: arXiv 1909.08593, section 2.2."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coupler.batch import Batch
from coupler.interfaces import Controller
from coupler.metrics import Metric, Metrics
from coupler_algos.config import PolicyConfig
from coupler_algos.groups import trajectories
from coupler_algos.kl import KL_COEF
from coupler_algos.shaping import kl_per_token

MAX_ERROR = 0.2


class AdaptiveKL(Controller):
    """Multiplies the coefficient by ``1 + clip(KL / target - 1, -0.2, 0.2) * n / horizon`` after n trajectories.

    KL is the mean over the batch of the sum over a trajectory, in nats, by ``kl_estimator``.
    """

    def __init__(self, config: PolicyConfig) -> None:
        self.config, self.value = config, config.kl_coef

    def apply(self, batch: Batch) -> Batch:
        """Add ``kl_coef`` [B] float32."""
        return batch.with_seqs(**{KL_COEF: np.full(len(batch), self.value, np.float32)})

    def update(self, batch: Batch) -> Metrics:
        """Adapt to the divergence of ``batch``; report it with the coefficient that was in force."""
        number = len(trajectories(batch)[0])
        total = float(kl_per_token(self.config, batch).sum())
        used = self.value
        error = float(np.clip(total / max(number, 1) / self.config.kl_target - 1, -MAX_ERROR, MAX_ERROR))
        self.value *= 1 + error * number / self.config.kl_horizon
        return {"kl/coef": Metric(used), "kl/trajectory": Metric(total, number)}

    def state(self) -> dict[str, float]:
        """The coefficient."""
        return {"value": self.value}

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue with the coefficient of :meth:`state`."""
        self.value = float(state["value"])
