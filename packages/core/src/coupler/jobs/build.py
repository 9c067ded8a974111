"""Parts: what jobs are built from."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from coupler.config.compose import Composed, dump_yaml
from coupler.config.options import SECTIONS, section
from coupler.config.reads import track
from coupler.config.schema import DataConfig
from coupler.data import Codec, Prompt, encode_prompts, load_rows
from coupler.errors import ConfigError, CouplerError, DataError
from coupler.executors import open_executor
from coupler.executors.interpreter import check_interpreter
from coupler.executors.placement import Role
from coupler.interfaces import Algorithm, EngineConfig, Head, Model, Part, Rank, ShardingManager
from coupler.loop.device_memory import Residency
from coupler.loop.engine_group import EngineGroup
from coupler.loop.evaluator import Evaluator
from coupler.loop.rollout_group import RolloutGroup
from coupler.loop.sampler import Scorer
from coupler.plugins.manager import Plugins
from coupler.plugins.tested import tested_ranges
from coupler.rewards import RewardPool
from coupler.run import resume
from coupler.run.checkpoint import Checkpoint, Checkpoints
from coupler.run.plan import VALUES, Plan, on_sync, trained_engines, weight_path
from coupler.run.provenance import installed
from coupler.run.run_folder import Journal
from coupler.run.saving import Resumable, export_folder
from coupler.system.files import writing
from coupler.system.imports import file_of, resolve
from coupler.system.seeding import derive
from coupler.worker.spec import WorkerSpec
from coupler.worker.torch.profiling import NOTHING, Profile


class Parts:
    """Builds one thing per method, from a composed configuration; construction loads nothing heavy."""

    def __init__(self, composed: Composed, plugins: Plugins) -> None:
        self.composed, self.plugins = composed, plugins
        self.config, self.reads = track(composed.config)
        self.model = Model(model_folder(self.config.model.path), self.config.model.trust_remote_code)
        self.executor = open_executor(self.config)
        self.codec = Codec(self.model)
        self.read_later: tuple[str, ...] = ()  # beginnings of keys

    async def place(self, roles: Sequence[Role]) -> None:
        """Check the interpreters of roles that have their own, and take what all workers need.

        Of backends that run in our interpreter, versions are named that they were not tested with.
        """
        ours = [("tracker", name) for name in self.config.trackers]
        for path, kind in SECTIONS.items():
            inner = section(self.config, path)
            if inner and kind != "algorithm" and inner.python:
                check_interpreter(kind, inner.name, inner.python, self.plugins)
            elif inner:
                ours.append((kind, inner.name))
        for one in tested_ranges(self.plugins, ours):
            if not one.within:
                print(f"coupler: warning: {one.distribution} {one.problem}", file=sys.stderr)
        await self.executor.place(roles)

    def ranks(self, role: str, count: int) -> list[Rank]:
        seeds, deterministic = self.config.seed, self.config.deterministic
        return [
            Rank(index=i, world=count, seed=derive(seeds, role, i), deterministic=deterministic) for i in range(count)
        ]

    def algorithm(self) -> Algorithm:
        return self.plugins.get("algorithm", self.config.algorithm.name).load()(self.config.algorithm)

    def trained_engines(self) -> dict[str, EngineConfig]:
        """The configurations of the engines that train, by role."""
        return trained_engines(self.config, VALUES in self.algorithm().needs)

    def engine(self, role: str, *, trains: bool) -> EngineGroup:
        config = self.config
        spec = WorkerSpec(
            role=role,
            engine=self.plugins.get("engine", config.engine.name).target,
            engine_config=self.trained_engines()[role] if trains else config.engine,
            model=self.model,
            algorithm=(self.plugins.get("algorithm", config.algorithm.name).target, config.algorithm)
            if trains
            else None,
            profile=self.profile(),
        )
        return EngineGroup(self.executor, spec, self.ranks(role, config.engine.ranks))

    def profile(self) -> Profile:
        """What ``profile`` asks for; nothing where it names no step."""
        config = self.config.profile
        if not config.steps:
            return NOTHING
        folder = Path(config.path) if config.path else Path(self.config.run_dir) / "profile"
        return Profile(tuple(config.ranks), tuple(config.steps), str(folder.absolute()))

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

    def critic(self, model: Model, loss: str) -> EngineGroup:
        """The engine of ``critic.engine``, trained with the algorithm ``loss``."""
        config = self.config
        spec = WorkerSpec(
            role="critic",
            engine=self.plugins.get("engine", config.critic.engine.name).target,
            engine_config=self.trained_engines()["critic"],
            model=model,
            algorithm=(loss, config.algorithm),
            profile=self.profile(),
        )
        return EngineGroup(self.executor, spec, self.ranks("critic", config.critic.engine.ranks))

    def rollouts(self) -> RolloutGroup:
        config = self.config.rollout
        target = self.plugins.get("rollout", config.name).target
        return RolloutGroup(self.executor, target, config, self.model, self.ranks("rollout", config.replicas))

    def prompts(self, data: DataConfig, key: str) -> list[Prompt]:
        if not data.source:
            raise ConfigError(f"{key}.source is not set.\n  set it to:  a .jsonl or .parquet file, or pkg.mod:function")
        prompts, dropped = encode_prompts(load_rows(data, key), self.codec, data, key)
        if dropped:
            print(f"{key}: dropped {dropped} prompts that are too long")
        return prompts

    def edge(self, engine: EngineGroup, rollouts: RolloutGroup, probe: Prompt, residency: Residency) -> ShardingManager:
        config, plugins = self.config, self.plugins
        weight_format, transport = weight_path(config, plugins)
        return plugins.get("sharding", config.sync.manager).load()(
            config.sync,
            engine=engine,
            rollouts=rollouts,
            weight_format=weight_format,
            transport=plugins.get("transport", transport).target,
            probe_prompt=probe.ids,
            temperature=config.sampling.temperature,
            residency=residency,
            in_flight=on_sync(config, plugins),
        )

    async def report_unread(self) -> None:
        """Name the keys that were set and that nothing has read.

        Raises:
            ConfigError: there are some, and ``strict`` is set.
        """
        strict = self.config.strict  # first, since this is what reads it
        self.reads.keys.update(await self.executor.reads())
        unread = [k for k in self.reads.unread(self.composed.set_keys) if not k.startswith(self.read_later)]
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
            settings.top_p,
            self.config.seed,
        )

    def previous(self) -> Checkpoint | None:
        """The checkpoint that this run goes on from.

        Raises:
            ConfigError: ``run_dir`` holds another run, or nothing whole.
        """
        return resume.find(self.config, dump_yaml(self.composed.config))

    def is_complete(self, done: int) -> bool:
        """Whether ``done`` steps are all that was asked for, with their export written."""
        exported = not self.config.checkpoint.export or export_folder(self.config.run_dir, "policy").exists()
        if complete := done >= self.config.steps and exported:
            print(f"coupler: {self.config.run_dir} is complete at step {done}; there is nothing to train")
        return complete

    def facts(self, data: str) -> dict[str, str]:
        """What tells this run from another one in its folder: what it trains or scores with, and how.

        Args:
            data: the fingerprint of its rows.
        """
        return {"data": data, "config": resume.config_hash(dump_yaml(self.composed.config))}

    def code(self) -> dict[str, Path]:
        """A file of each thing that the run is made of, beside core, by the option that names it."""
        config = self.composed.config  # to look at an option here is no use of it
        targets = {"reward": config.reward.target}
        for path, kind in SECTIONS.items():
            if inner := section(config, path):
                targets[path] = self.plugins.get(kind, inner.name).target
        files = {name: file for name, target in targets.items() if (file := file_of(target))}
        given = [Path(origin) for origin in self.composed.origin.values() if Path(origin).is_file()]
        return {**files, "--config": given[0]} if given else files

    @contextmanager
    def recording(self, data: str, found: Checkpoint | None = None, plan: Plan | None = None) -> Iterator[Journal]:
        """The run's folder and trackers, for as long as the job runs; at its end every role's thread stops."""
        resolved, done = dump_yaml(self.composed.config), found.step if found else 0
        facts = {**self.facts(data), **({"plan": plan.plain()} if plan else {})}
        try:
            with Journal(self.config, resolved, self.plugins, facts, self.code(), done) as journal:
                yield journal
        finally:
            self.executor.close()

    @contextmanager
    def running(
        self, data: str, found: Checkpoint | None = None, plan: Plan | None = None
    ) -> Iterator[tuple[Journal, RewardPool]]:
        """:meth:`recording`, with the reward processes."""
        reward = self.config.reward
        pool = RewardPool(reward.target, reward.num_workers, reward.timeout_s, reward.max_invalid_fraction)
        try:
            pool.start()
            with self.recording(data, found, plan) as journal:
                yield journal, pool
        finally:
            pool.close()

    def checkpoints(self, data: str) -> Checkpoints:
        """Those of this run, whose rows have the fingerprint ``data``."""
        self.read_later = ("checkpoint.",)
        facts = {**self.facts(data), "packages": installed()}
        return Checkpoints(Path(self.config.run_dir) / "checkpoints", self.config.checkpoint, facts)

    async def restore(
        self,
        found: Checkpoint,
        roles: Mapping[str, EngineGroup],
        trainer: Resumable,
        data: str,
        hold: Callable[[str], AbstractAsyncContextManager[Any]],
    ) -> None:
        """Bring engines and trainer to where ``found`` was made; of another configuration, the engines alone.

        Args:
            hold: all of a role is on its device within it.

        Raises:
            DataError: the rows are other ones than then.
        """
        reset = self.config.checkpoint.reset_data
        if found.manifest["data"] != data and not reset:
            raise DataError(
                f"the data is not what {found.folder} was made with.\n"
                "  try:  the same data, or checkpoint.reset_data=true to start it from the beginning"
            )
        if Part.OPTIMIZER not in found.manifest["parts"]:
            print(
                f"coupler: {found.folder} holds no optimizer: its moments and the learning rate's schedule start anew"
            )
        held = {role: group for role, group in roles.items() if role in found.manifest["roles"]}
        for role, group in held.items():
            async with hold(role):
                await found.restore(role, group)
        if found.manifest["config"] == self.facts(data)["config"]:
            trainer.restore(found.state, reset_data=reset)
            return
        trainer.start_at(found.step)  # what it counted and sampled, it did in that configuration's units
        anew = ", ".join(["prompts", *(role for role in roles if role not in held)])
        print(
            f"coupler: {found.folder} is of another configuration: {', '.join(held)} as it was there; {anew} start anew"
        )

    async def export(self, group: EngineGroup) -> None:
        """Write the model in Hugging Face layout, to ``export`` or ``export_critic``; it appears when it is whole."""
        folder = export_folder(self.config.run_dir, group.spec.role)
        await export_whole(group, folder, Path(group.spec.model.path))


@contextmanager
def heap_set_aside() -> Iterator[None]:
    """Keep Python's collector from what exists by now: amid a step it would walk through all that was imported."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


async def export_whole(group: EngineGroup, folder: Path, source: Path) -> None:
    """Export beside ``folder`` and rename."""
    part = folder.with_name(f"{folder.name}.part")
    with writing(f"the export {folder}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(part, ignore_errors=True)
    await group.export(part, source)
    with writing(f"the export {folder}"):
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)


def model_folder(path: str, key: str = "model") -> str:
    """The folder that ``KEY.path`` names: itself, or what the function ``pkg.mod:name`` returns.

    Raises:
        ConfigError: there is no such function, or it raised.
    """
    if ":" not in path or Path(path).exists():
        return path
    try:
        function = resolve(path)
    except (Exception, SystemExit) as error:  # importing runs the user's code
        raise ConfigError(f"{key}.path={path} is no folder, and no function either: {error}") from None
    try:
        return str(function())
    except CouplerError:
        raise
    except (Exception, SystemExit) as error:  # code of the user
        raise ConfigError(f"{key}.path={path} names a function that raised {error!r}.") from error
