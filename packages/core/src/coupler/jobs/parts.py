"""Parts: what jobs are built from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from coupler import checkpoint
from coupler.config.compose import Composed, dump_yaml
from coupler.config.reads import track
from coupler.config.schema import DataConfig
from coupler.data import Codec, Prompt, encode_prompts, load_rows
from coupler.errors import ConfigError, CouplerError
from coupler.evaluation import Evaluator
from coupler.imports import resolve
from coupler.interfaces import EVERYTHING, Algorithm, Head, Model, Part, Rank
from coupler.journal import Journal
from coupler.plugins.manager import Plugins
from coupler.rewards import RewardPool
from coupler.rollouts import RolloutGroup
from coupler.sampling import Scorer
from coupler.seeding import derive
from coupler.sharding import StreamShardingManager
from coupler.workers import Local, WorkerGroup, WorkerSpec


class Parts:
    """Builds one thing per method, from a composed configuration; construction loads nothing heavy."""

    def __init__(self, composed: Composed, plugins: Plugins) -> None:
        self.composed, self.plugins = composed, plugins
        self.config, self.reads = track(composed.config)
        self.model = Model(model_folder(self.config.model.path), self.config.model.trust_remote_code)
        self.executor = Local(inline=self.config.max_staleness == 0)
        self.codec = Codec(self.model)

    def rank(self, role: str) -> Rank:
        return Rank(seed=derive(self.config.seed, role, 0))

    def algorithm(self) -> Algorithm:
        return self.plugins.get("algorithm", self.config.algorithm.name).load()(self.config.algorithm)

    def engine(self, role: str, *, trains: bool) -> WorkerGroup:
        config = self.config
        spec = WorkerSpec(
            role=role,
            engine=self.plugins.get("engine", config.engine.name).target,
            engine_config=config.engine,
            model=self.model,
            algorithm=(self.plugins.get("algorithm", config.algorithm.name).target, config.algorithm)
            if trains
            else None,
        )
        return WorkerGroup(self.executor, spec, [self.rank(role)])

    def critic_model(self) -> Model:
        """The model of ``critic.model``, or the policy's, with a value head.

        Raises:
            ConfigError: ``critic.model.path`` is no folder.
        """
        path = self.config.critic.model.path
        folder = model_folder(path, "critic.model") if path else self.model.path
        if not Path(folder).is_dir():
            raise ConfigError(
                f"critic.model.path={folder} is no folder.\n  try:  leaving it out: model.path then serves"
            )
        return replace(self.model, path=folder, head=Head.VALUE)

    def critic(self, model: Model, loss: str) -> WorkerGroup:
        """The engine of ``critic.engine``, trained with the algorithm ``loss``."""
        config = self.config
        spec = WorkerSpec(
            role="critic",
            engine=self.plugins.get("engine", config.critic.engine.name).target,
            engine_config=config.critic.engine,
            model=model,
            algorithm=(loss, config.algorithm),
        )
        return WorkerGroup(self.executor, spec, [self.rank("critic")])

    def rollouts(self) -> RolloutGroup:
        backend = self.plugins.get("rollout", self.config.rollout.name)
        return RolloutGroup(self.executor, backend.target, self.config.rollout, self.model, [self.rank("rollout")])

    def prompts(self, data: DataConfig, key: str) -> list[Prompt]:
        if not data.source:
            raise ConfigError(f"{key}.source is not set.\n  set it to:  a .jsonl or .parquet file, or pkg.mod:function")
        prompts, dropped = encode_prompts(load_rows(data, key), self.codec, data, key)
        if dropped:
            print(f"{key}: dropped {dropped} prompts of more than {data.max_prompt_tokens} tokens")
        return prompts

    def edge(self, engine: WorkerGroup, rollouts: RolloutGroup, probe: Prompt) -> StreamShardingManager:
        config, plugins = self.config, self.plugins
        weight_format, transport = plugins.hook.coupler_weight_path(
            engine=plugins.get("engine", config.engine.name),
            rollout=plugins.get("rollout", config.rollout.name),
            transports=plugins.of("transport"),
            config=config,
        )
        return plugins.get("sharding", config.sync.manager).load()(
            config.sync,
            engine=engine,
            rollouts=rollouts,
            weight_format=weight_format,
            transport=plugins.get("transport", transport).target,
            probe_prompt=probe.ids,
            temperature=config.sampling.temperature,
        )

    def report_unread(self) -> None:
        """Name the keys that were set and that nothing has read.

        Raises:
            ConfigError: there are some, and ``strict`` is set.
        """
        strict = self.config.strict  # first, since this is what reads it
        later = ("checkpoint.",)  # read when the first one is written
        unread = [k for k in self.reads.unread(self.composed.set_keys) if not k.startswith(later)]
        if not unread:
            return
        sentence = f"you set {', '.join(unread)}, and nothing read {'it' if len(unread) == 1 else 'them'}."
        if strict:
            raise ConfigError(
                f"{sentence}\n  try:  leave them out; what you wanted has another name or another backend"
            )
        print(f"coupler: warning: {sentence}", file=sys.stderr)

    def scorer(self, rollouts: RolloutGroup, rewards: RewardPool) -> Scorer:
        return Scorer(rollouts, rewards, self.codec, self.codec.stop_ids(self.config.sampling.stop))

    def evaluator(self, scorer: Scorer, prompts: list[Prompt]) -> Evaluator:
        settings = self.config.eval
        return Evaluator(
            scorer,
            prompts,
            settings.samples_per_prompt,
            settings.max_tokens or self.config.sampling.max_tokens,
            settings.temperature,
            self.config.seed,
        )

    @contextmanager
    def recording(self) -> Iterator[Journal]:
        """The run's folder and trackers, for as long as the job runs; at its end every role's thread stops."""
        try:
            journal = Journal(self.config, dump_yaml(self.composed.config), self.plugins)
        except OSError as error:
            raise ConfigError(
                f"run_dir={self.config.run_dir} cannot be written: {error.strerror}.\n  try:  another run_dir"
            ) from None
        try:
            yield journal
        finally:
            journal.close()
            self.executor.close()

    @contextmanager
    def running(self) -> Iterator[tuple[Journal, RewardPool]]:
        """:meth:`recording`, with the reward processes."""
        reward = self.config.reward
        pool = RewardPool(reward.target, reward.num_workers, reward.timeout_s, reward.max_invalid_fraction)
        try:
            pool.start()
            with self.recording() as journal:
                yield journal, pool
        finally:
            pool.close()

    async def finish(self, group: WorkerGroup, journal: Journal, step: int) -> None:
        """Write the checkpoint and the export of the last step: ``export``, and ``export_critic`` of a critic."""
        await self.checkpoint(group, journal, step)
        if self.config.checkpoint.export:
            folder = "export" if group.spec.role == "policy" else f"export_{group.spec.role}"
            await group.all("export", journal.run_dir / folder, Path(group.spec.model.path))

    async def checkpoint(self, group: WorkerGroup, journal: Journal, step: int) -> None:
        """Write ``checkpoints/step_N`` of the policy, or the folder ``critic`` in it."""
        what = EVERYTHING - {Part.GRADS} if self.config.checkpoint.optimizer else frozenset({Part.PARAMS})
        folder = journal.run_dir / "checkpoints" / f"step_{step}"
        folder = folder if group.spec.role == "policy" else folder / group.spec.role
        await checkpoint.save(group, folder, step, what, self.config.checkpoint.deadline_s)


def model_folder(path: str, key: str = "model") -> str:
    """The folder that ``KEY.path`` names: itself, or what the function ``pkg.mod:name`` returns.

    Raises:
        ConfigError: there is no such function.
    """
    if ":" not in path or Path(path).exists():
        return path
    try:
        function = resolve(path)
    except (CouplerError, ImportError) as error:
        raise ConfigError(f"{key}.path={path} is no folder, and no function either: {error}") from None
    return str(function())
