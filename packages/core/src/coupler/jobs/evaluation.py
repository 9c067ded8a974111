"""Evaluate during training, with the rollouts of training or with those of
``eval.rollout``.
"""

from __future__ import annotations

from dataclasses import dataclass

from coupler.conversation.packing import Sample
from coupler.data import Prompt
from coupler.executors.placement import EVAL_ROLLOUT
from coupler.interfaces import InFlight, ShardingManager
from coupler.jobs.build import Builder
from coupler.jobs.device_sharing import share_devices
from coupler.jobs.evaluator import Evaluator
from coupler.loop.device_memory import GENERATING, Residency
from coupler.loop.engine_group import EngineGroup
from coupler.loop.sampler import Scorer
from coupler.loop.sync_answer import answer_of
from coupler.metrics import Metrics
from coupler.run.plan import Plan


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores held-out prompts with the weights of a step."""

    evaluator: Evaluator
    residency: Residency
    # The way to rollouts that serve evaluations alone. None where training's serve.
    weights: ShardingManager | None = None

    async def start(self) -> None:
        """Start the rollouts that serve evaluations alone."""
        if self.weights:
            await self.residency.start("rollout", self.weights.setup)

    async def run(self, step: int) -> tuple[Metrics, list[Sample]]:
        """Return the metrics of an evaluation after ``step``, and what it scored.

        Raises:
            WeightSyncError: rollouts of its own do not run the engine's weights.
        """
        synced = await self._bring(step, self.weights) if self.weights else {}
        async with self.residency("eval", GENERATING):
            evaluated, scored = await self.evaluator.run()
        return evaluated | synced, scored

    async def _bring(self, step: int, weights: ShardingManager) -> Metrics:
        """Bring the weights of ``step``, and compare log-probs on what they sample.

        The first ones in this process are proved. A run that goes on measures the same.
        """
        call = "prove" if weights.version < 0 else "sync"
        found = await answer_of(weights, call, step) | await answer_of(weights, "probe")
        return {f"eval/{name}": metric for name, metric in found.items() if "/probe" in name}


def make_evaluation(
    builder: Builder,
    plan: Plan,
    policy: EngineGroup,
    prompts: list[Prompt],
    scorer: Scorer,
    residency: Residency,
) -> Evaluation | None:
    """Make the evaluation of a run, or None where there is nothing to evaluate.

    Args:
        scorer: what samples with the rollouts of training.
        residency: of the roles of training.
    """
    if not prompts:
        return None
    if not plan.eval_weight_path[1]:
        return Evaluation(builder.evaluator(scorer, prompts), residency)

    rollouts = builder.rollouts(EVAL_ROLLOUT)
    residency = share_devices(builder.config, plan, rollouts, policy)
    weights = builder.weight_sync(
        policy,
        rollouts,
        prompts[0],
        residency,
        path=plan.eval_weight_path,
        in_flight=InFlight.DRAIN,
    )
    evaluator = builder.evaluator(builder.scorer(rollouts, scorer.rewards), prompts)
    return Evaluation(evaluator, residency, weights)
