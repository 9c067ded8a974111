"""A whole reinforcement-learning run on the toy backends: everything of core but the
command line and the tokenizer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from coupler.config.schema import RouterReplay, RunConfig, SamplingConfig
from coupler.conversation.episodes import OneTurn
from coupler.data import Prompt, PromptStream, Row
from coupler.executors import Local
from coupler.executors.waits import Waits
from coupler.interfaces import Algorithm, Head, InFlight, Model, Rank, Request
from coupler.jobs.device_sharing import share_devices, start
from coupler.jobs.train import column_providers
from coupler.loop.buffer import Buffer
from coupler.loop.engine_group import EngineGroup
from coupler.loop.rollout_group import RolloutGroup
from coupler.loop.sampler import Sampler, Scorer
from coupler.loop.trainer import Trainer
from coupler.loop.weight_sync import StreamShardingManager
from coupler.metrics import Metrics
from coupler.rewards import RewardPool
from coupler.rewards.opinions import Rewards
from coupler.run.sampling_check import SamplingCheck
from coupler.run.step_record import Recorder
from coupler.testing.models import write_toy
from coupler.testing.toy_config import ToyAlgorithmConfig, ToyEngineConfig, ToyRolloutConfig
from coupler.worker.replica import RolloutSpec
from coupler.worker.spec import WorkerSpec

REWARD = (
    "def score(completion):\n    return sum(int(t) >= 160 for t in completion.split()) / "
    "len(completion.split())\n"
)


class Numbers:
    """A codec whose text is the ids."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def small(**changes: object) -> RunConfig:
    """A run of seconds."""
    settings = {
        "steps": 6,
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        "sampling": SamplingConfig(max_tokens=8),
    }
    return RunConfig(**{**settings, **changes})  # type: ignore[arg-type]


class ToyRun:
    """Builds the parts; ``log`` collects what every step reported. Sampled ids of 160
    and more are rewarded.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        *,
        engine: str = "coupler.testing.toy:ToyEngine",
        algorithm: str = "coupler.testing.toy:ToyAlgorithm",
        rollout: str = "coupler.testing.toy:ToyRollout",
        transport: str = "coupler.builtin.transports.inproc:InprocTransport",
        reward: str = REWARD,
        in_flight: InFlight = InFlight.DRAIN,
        replicas: int = 1,
        parts: int = 1,
    ) -> None:
        self.config, self.folder, self.parts = config, folder, parts
        self.model = Model(str(write_toy(folder / "model")))
        self.executor = Local(inline=config.max_staleness == 0, waits=Waits(60.0, 60.0))
        spec = WorkerSpec(
            "policy",
            engine,
            ToyEngineConfig(lr=0.3),
            self.model,
            (algorithm, ToyAlgorithmConfig()),
        )
        self.policy = EngineGroup(self.executor, spec, [Rank()])
        self.critic: EngineGroup | None = None
        if self.policy.algorithm and self.policy.algorithm.critic:
            values = replace(
                spec,
                role="critic",
                engine_config=ToyEngineConfig(lr=0.1),
                model=replace(self.model, head=Head.VALUE),
                algorithm=(self.policy.algorithm.critic, ToyAlgorithmConfig()),
            )
            self.critic = EngineGroup(self.executor, values, [Rank()])
        self.rollouts = RolloutGroup(
            self.executor,
            RolloutSpec(rollout, ToyRolloutConfig(), self.model),
            [Rank()] * replicas,
        )
        self.residency = share_devices(config, None, self.rollouts, self.policy, critic=self.critic)
        self.weights = StreamShardingManager(
            config.sync,
            engine=self.policy,
            rollouts=self.rollouts,
            weight_format="full",
            transport=transport,
            probe_prompt=(5, 6, 7),
            temperature=config.sampling.temperature,
            residency=self.residency,
            in_flight=in_flight,
        )
        (folder / "reward.py").write_text(reward)
        self.pool = RewardPool(f"{folder / 'reward.py'}:score", 1, 10.0, 0.01)
        self.log: list[dict[str, float]] = []

    async def _after(self, step: int, metrics: Metrics) -> None:
        self.log.append({name: metric.value for name, metric in metrics.items()})

    def build(self, algorithm: Algorithm) -> Trainer:
        config = self.config
        prompts = [
            Prompt(Row(prompt=str(i), answer="", index=i, extra={}), (10 + i, 20 + i))
            for i in range(16)
        ]
        self.buffer = Buffer(
            config.prompts_per_step, config.max_staleness, 10 * config.prompts_per_step
        )
        codec: Any = Numbers()
        self.sampler = Sampler(
            Request(
                (),
                config.sampling.max_tokens,
                config.sampling.temperature,
                top_p=config.sampling.top_p,
                top_k=config.sampling.top_k,
                routed_experts=config.router_replay is RouterReplay.R3,
            ),
            config.samples_per_prompt,
            config.seed,
            prompts=PromptStream(prompts, config.seed, shuffle=True),
            scorer=Scorer(self.rollouts, Rewards(self.pool), codec, OneTurn(self.rollouts, ())),
            algorithm=algorithm,
            buffer=self.buffer,
        )
        self.trainer = Trainer(
            config,
            policy=self.policy,
            critic=self.critic,
            weights=self.weights,
            algorithm=algorithm,
            sampler=self.sampler,
            buffer=self.buffer,
            providers=column_providers(
                config, self.policy, None, self.critic, self.residency, algorithm.needs
            ),
            residency=self.residency,
            record=Recorder(self.folder / "record", config.record.every_steps).write,
            judge=SamplingCheck(config.sync.max_sampling_z).judge,
            parts=self.parts,
        )
        return self.trainer

    def run(self) -> list[dict[str, float]]:
        """Train; return the values of every step, the start first."""

        async def go() -> None:
            await start(self.residency, self.weights, self.policy, self.critic)
            assert self.policy.algorithm
            await self.build(self.policy.algorithm).fit(self._after)

        self.pool.start()
        try:
            asyncio.run(go())
        finally:
            self.pool.close()
            self.executor.close()
        return self.log
