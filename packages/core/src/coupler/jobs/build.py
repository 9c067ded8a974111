"""Build engines, rollouts and the weight sync from a composed configuration."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from math import inf
from pathlib import Path

from coupler.config.checks import does_evaluate, episode_tokens, longest_sequence
from coupler.config.compose import Composed
from coupler.config.schema import DataConfig, Job
from coupler.conversation import Renderer
from coupler.conversation.choice import choose_renderer
from coupler.conversation.episodes import Episodes, OneTurn, Plays
from coupler.conversation.workers import open_environment
from coupler.data import Codec, Prompt, Row, encode_prompts, load_rows
from coupler.data.model_folder import model_folder
from coupler.errors import ConfigError
from coupler.executors import open_executor
from coupler.executors.classes import load_class
from coupler.executors.interpreter import check_interpreter
from coupler.executors.placement import ROLLOUT
from coupler.interfaces import (
    Algorithm,
    EngineConfig,
    Environment,
    Head,
    InFlight,
    Model,
    Rank,
    Request,
    ShardingManager,
)
from coupler.jobs.evaluator import Evaluator
from coupler.loop.device_memory import Residency
from coupler.loop.engine_group import EngineGroup
from coupler.loop.rollout_group import RolloutGroup
from coupler.loop.sampler import Scorer
from coupler.plugins.manager import Plugins
from coupler.rewards.opinions import Rewards
from coupler.run.memory_plan import leaves_recompute, plan_memory, with_recompute
from coupler.run.memory_text import render_recomputed
from coupler.run.plan import VALUES, Plan, trained_engines
from coupler.run.row_form import SCORES, capabilities
from coupler.run.session import Session
from coupler.system.gpu import gpu_is_visible
from coupler.system.log import PLAIN, get_logger
from coupler.system.reads import original, track
from coupler.system.seeding import derive
from coupler.worker.replica import RolloutSpec
from coupler.worker.spec import WorkerSpec
from coupler.worker.torch.profiling import NOTHING, Profile

log = get_logger(__name__)


class Builder:
    """Makes one thing per method. Construction loads nothing heavy."""

    def __init__(self, composed: Composed, plugins: Plugins) -> None:
        self.composed, self.plugins = composed, plugins
        self.config, self.reads = track(composed.config)
        self.model = Model(
            model_folder(self.config.model.path), self.config.model.trust_remote_code
        )
        self.executor = open_executor(self.config)
        self._rows: dict[str, list[Row]] = {}

    @cached_property
    def codec(self) -> Codec:
        """The tokenizer of the model. Rows are read before it is loaded."""
        return Codec(self.model)

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm of the run, as the controller uses it."""
        made = load_class(self.plugins, "algorithm", self.config.algorithm.name)
        return made(self.config.algorithm)

    @cached_property
    def trained_engines(self) -> dict[str, EngineConfig]:
        """The configurations of the engines that train, by role."""
        return trained_engines(self.config, VALUES in self.algorithm.needs)

    def settle_recompute(self, plan: Plan) -> None:
        """Let as few layers as fit compute their activations again, where a role leaves
        it to the plan.

        It comes before engines are made, so that all ranks do the same. Without a GPU
        engines take all layers.
        """
        engines = self.trained_engines
        leaving = [role for role, engine in engines.items() if leaves_recompute(engine)]
        if not leaving:
            return
        if not gpu_is_visible():
            who = " and ".join(leaving)
            log.info(f"{who}: all layers recompute, since the controller sees no GPU", extra=PLAIN)
            return

        memory = plan_memory(self.config, plan)
        for line in render_recomputed(memory):
            log.info(line, extra=PLAIN)

        self.config = with_recompute(self.config, memory)
        del self.trained_engines

    def reference(self) -> EngineGroup:
        """Make the engine of the reference, whose weights stay those of the folder."""
        return self.engine("reference", trains=False, frozen=True)

    def engine(self, role: str, *, trains: bool, frozen: bool = False) -> EngineGroup:
        """Make the engine of the policy, or of one that does not train.

        Args:
            frozen: its weights are those of the model's folder and stay so.
        """
        config = self.config
        algorithm = None
        if trains:  # an evaluation names no algorithm
            target = self.plugins.get("algorithm", config.algorithm.name).target
            algorithm = (target, config.algorithm)

        scores = SCORES in capabilities(config, self.plugins)
        spec = WorkerSpec(
            role=role,
            engine=self.plugins.get("engine", config.engine.name).target,
            engine_config=self.trained_engines[role] if trains else config.engine,
            model=replace(
                self.model,
                head=Head.SCORE if scores else self.model.head,
                frozen=frozen,
            ),
            algorithm=algorithm,
            profile=self.profile(),
        )

        return EngineGroup(self.executor, spec, self.ranks(role, config.engine.ranks))

    def critic(self, model: Model) -> EngineGroup:
        """Make the engine of ``critic.engine``, with the loss of the algorithm."""
        config = self.config

        spec = WorkerSpec(
            role="critic",
            engine=self.plugins.get("engine", config.critic.engine.name).target,
            engine_config=self.trained_engines["critic"],
            model=model,
            algorithm=(self.algorithm.critic, config.algorithm),
            profile=self.profile(),
        )

        return EngineGroup(self.executor, spec, self.ranks("critic", config.critic.engine.ranks))

    def frozen(self, role: str, engine: EngineConfig, model: Model) -> EngineGroup:
        """Make an engine of another model than the policy's, which never trains."""
        target = self.plugins.get("engine", engine.name).target
        frozen = replace(model, frozen=True)
        spec = WorkerSpec(role, target, engine, frozen, algorithm=None)
        return EngineGroup(self.executor, spec, self.ranks(role, engine.ranks))

    def critic_model(self) -> Model:
        """Return the model of ``critic.model``, or the policy's, with a value head.

        Raises:
            ConfigError: ``critic.model.path`` is no folder.
        """
        path = self.config.critic.model.path
        folder = model_folder(path, "critic.model") if path else self.model.path
        if not Path(folder).is_dir():
            raise ConfigError(
                f"critic.model.path={folder} is no folder.\n  try:  leaving it out: "
                "model.path then serves"
            )
        return replace(self.model, path=folder, head=Head.VALUE)

    def rollouts(self, role: str = ROLLOUT) -> RolloutGroup:
        """Make the replicas of the rollout, or of that of evaluations."""
        config, path = self.config.rollout, "rollout"
        if role != ROLLOUT:
            config, path = self.config.eval.rollout, "eval.rollout"
        longest = longest_sequence(original(self.config), path)
        longest = min(longest, self.codec.max_positions or longest)

        target = self.plugins.get("rollout", config.name).target
        spec = RolloutSpec(target, config.for_run(longest), self.model)
        return RolloutGroup(self.executor, spec, self.ranks(role, config.replicas), role)

    def weight_sync(
        self,
        engine: EngineGroup,
        rollouts: RolloutGroup,
        probe: Prompt,
        residency: Residency,
        *,
        path: tuple[str, str],
        in_flight: InFlight,
    ) -> ShardingManager:
        """Make the weight sync between ``engine`` and ``rollouts``.

        Args:
            path: the format and the name of the transport.
            in_flight: what a sync does with requests that are being sampled.
        """
        # The plan has resolved these two.
        self.reads.keys.update(("sync.transport", "sync.in_flight"))

        weight_format, transport = path
        return load_class(self.plugins, "sharding", self.config.sync.manager)(
            self.config.sync,
            engine=engine,
            rollouts=rollouts,
            weight_format=weight_format,
            transport=self.plugins.get("transport", transport).target,
            probe_prompt=probe.ids,
            temperature=self.config.sampling.temperature,
            residency=residency,
            in_flight=in_flight,
        )

    def rows(self, data: DataConfig, key: str) -> list[Row]:
        """Load the rows of ``data``, the section ``key``, once."""
        if not data.source:
            raise ConfigError(
                f"{key}.source is not set.\n  set it to:  a .jsonl or .parquet file, or "
                "pkg.mod:function"
            )

        if key not in self._rows:
            self._rows[key] = load_rows(data, key)
        return self._rows[key]

    def read_rows(self) -> None:
        """Read the rows of all sections, before the tokenizer imports torch."""
        self.rows(self.config.data, "data")
        if does_evaluate(self.config, Job.TRAIN):
            self.rows(self.config.eval.data, "eval.data")

    def prompts(self, data: DataConfig, key: str) -> list[Prompt]:
        """Load and encode the prompts of ``data``, the section ``key``."""
        prompts, dropped = encode_prompts(self.rows(data, key), self.codec, data, key)
        if dropped:
            log.info(f"{key}: dropped {dropped} prompts that are too long", extra=PLAIN)
        return prompts

    def held_out(self) -> list[Prompt]:
        """Load and encode the prompts that training evaluates on, if it does."""
        if not does_evaluate(self.config, Job.TRAIN):
            return []
        return self.prompts(self.config.eval.data, "eval.data")

    @cached_property
    def environment(self) -> Environment | None:
        """The environment of the run, if it has one."""
        config = self.config.environment
        if not config:
            return None
        if config.python:
            check_interpreter(
                "environment", config.name, config.python, self.plugins, pickles=False
            )
        return open_environment(
            config, lambda: load_class(self.plugins, "environment", config.name)
        )

    def prepare_environment(self) -> None:
        """Make the environment, and prove the chat template for it.

        Raises:
            CouplerError: it cannot be made, or the template is not exact.
        """
        if self.environment:
            self.renderer = self._prove(self.environment)

    def _prove(self, environment: Environment) -> Renderer:
        renderer = choose_renderer(
            self.codec,
            environment.config.renderer,
            tools=environment.uses_tools,
            stop=self.config.sampling.stop,
            keep_reasoning=environment.config.keep_reasoning,
        )
        log.info(f"messages become ids by {renderer}", extra=PLAIN)
        return renderer

    def scorer(self, rollouts: RolloutGroup, rewards: Rewards) -> Scorer:
        """Make what plays episodes and scores them."""
        return Scorer(rollouts, rewards, self.codec, self._episodes(rollouts))

    def _episodes(self, rollouts: RolloutGroup) -> Plays:
        if not self.environment:
            return OneTurn(rollouts, self.codec.stop_ids(self.config.sampling.stop))
        tokens = min(episode_tokens(self.config), self.codec.max_positions or inf)
        return Episodes(
            self.environment, self.config.environment, rollouts, self.renderer, int(tokens)
        )

    @asynccontextmanager
    async def environment_set_up(self) -> AsyncIterator[None]:
        """Hold what the episodes of the environment share."""
        if not self.environment:
            yield
            return
        try:
            await self.environment.setup()
            yield
        finally:
            await self.environment.close()

    def evaluator(self, scorer: Scorer, prompts: list[Prompt]) -> Evaluator:
        """Make what scores held-out ``prompts``, under ``eval.*``."""
        samples = self.config.eval.samples_per_prompt
        return Evaluator(scorer, prompts, samples, self.eval_request(), self.config.seed)

    def eval_request(self) -> Request:
        """Return a request without a prompt, under ``eval.*``."""
        settings = self.config.eval
        max_tokens = settings.max_tokens or self.config.sampling.max_tokens
        return Request((), max_tokens, settings.temperature, top_p=settings.top_p)

    def session(self) -> Session:
        """Open the run's folder for this start of it."""
        return Session(self.composed, self.config, self.plugins, self.executor.close)

    def profile(self) -> Profile:
        """Return what ``profile`` asks for, which is nothing where it names no step."""
        config = self.config.profile
        if not config.steps:
            return NOTHING
        folder = Path(config.path) if config.path else Path(self.config.run_dir) / "profile"
        return Profile(tuple(config.ranks), tuple(config.steps), str(folder.absolute()))

    def ranks(self, role: str, count: int) -> list[Rank]:
        """Return the places of ``count`` workers of a role, each with its seed."""
        seed, deterministic = self.config.seed, self.config.deterministic
        return [
            Rank(index=i, world=count, seed=derive(seed, role, i), deterministic=deterministic)
            for i in range(count)
        ]
