"""ShardingManager: the weight sync between an engine and its rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod

from coupler.metrics import Metrics


class ShardingManager(ABC):
    """Moves the weights of one edge (an engine, its rollouts) from the training to the inference layout."""

    @abstractmethod
    async def setup(self) -> None:
        """Prepare the edge and prove, before the first step, that weights arrive."""

    @abstractmethod
    async def sync(self, version: int) -> Metrics:
        """Bring every rollout to ``version``.

        Raises:
            WeightSyncError: a replica did not load everything that was sent.
        """
