"""Call a sync manager, and look at what it answers and how it leaves the rollouts."""

from __future__ import annotations

from coupler.errors import CouplerError
from coupler.interfaces import ShardingManager
from coupler.metrics import Metrics, given


async def answer_of(manager: ShardingManager, call: str, *version: int) -> Metrics:
    """Call ``prove``, ``sync`` or ``probe``, and return its metrics.

    Raises:
        CouplerError: they are no metrics, or the rollouts are paused afterwards.
    """
    whose = f"{call}() of sync.manager"
    metrics = given(await getattr(manager, call)(*version), whose)
    if manager.rollouts.paused:
        raise CouplerError(
            f"the rollouts are still paused after {whose}: they would never sample again.\n"
            "  look at:  sync.manager, which resumes them before it returns"
        )
    return metrics
