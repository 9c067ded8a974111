"""Plan a run before a device is taken.

The plan says how many sequences, steps and tokens the run has, and which roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from coupler.config.checks import does_evaluate, does_sample, episode_tokens
from coupler.config.options import in_full, section
from coupler.config.schema import ExecutorName, Job, Offload, OnSync, Placement, RunConfig
from coupler.conversation.choice import described
from coupler.errors import ConfigError, PluginError
from coupler.executors.placement import (
    EVAL_ROLLOUT,
    JUDGE,
    REWARD_MODEL,
    ROLLOUT,
    ROLLOUTS,
    TEACHER,
    Role,
)
from coupler.interfaces import EngineConfig, InFlight, RolloutConfig
from coupler.loop.turns import optimizer_steps
from coupler.plugins.backend import Backend
from coupler.plugins.manager import Plugins
from coupler.run.plan_checks import check, check_columns, no_turns
from coupler.run.plan_text import render
from coupler.run.teacher_check import check_teacher, role_of, teachers_of
from coupler.system.reads import original
from coupler.system.words import ceil_div, count

# Capability of a rollout.
RECOMPUTES = "in_flight:recompute"
# Column of a critic.
VALUES = "values"
# Sections of the rollouts, by role.
SERVED_BY = {ROLLOUT: "rollout", EVAL_ROLLOUT: "eval.rollout", JUDGE: "judge.rollout"}
# Begins the capabilities of an algorithm that name a column which core adds. An example
# is needs:ref_logprobs.
NEEDS = "needs:"
# Rows of an epoch where they are not loaded.
UNKNOWN = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Hold the numbers of a run. A sequence is one prompt with one completion."""

    job: Job
    steps: int
    prompts_per_step: int
    # 1 in supervised training.
    samples_per_prompt: int
    optimizer_steps_per_batch: int
    epochs_per_batch: int
    # Optimizer steps of the policy, over the run.
    optimizer_steps: int
    max_prompt_tokens: int
    # 0 in supervised training, where a row is as long as its text.
    max_completion_tokens: int
    # Above 1 where an episode may have several rows by an option of the environment.
    max_rows_per_episode: int
    # What turns messages into ids. Empty without an environment.
    renderer: str
    # 0 if the engine has no such option.
    max_tokens_per_micro_batch: int
    # The schedule of the learning rate by trained role, where its engine says one.
    rates: Mapping[str, str]
    max_staleness: int
    # What a sync does with requests that are being sampled.
    in_flight: InFlight
    # None if the number is not known without loading the data, or there are no epochs.
    num_rows: int | None
    # Data shards of the engine.
    num_shards: int
    executor: ExecutorName
    # None if everything runs in one process.
    placement: Placement | None
    workers: tuple[Role, ...]
    # For example "policy (engine toy)" and "rollout (toy) x 2".
    roles: tuple[str, ...]
    # The way of weights from engine to rollout. Empty where nothing is sampled.
    weights: str
    # The format and the transport of weights. Empty where nothing is sampled.
    weight_path: tuple[str, str]
    # The same to the rollout of evaluations. Empty where that of training serves.
    eval_weight_path: tuple[str, str]
    # The policy can answer as it was before training, so that no other engine has to.
    own_reference: bool
    # AUTO leaves it to estimates. It is FALSE where roles cannot take turns.
    offload: Offload
    trackers: tuple[str, ...]
    run_dir: str

    @property
    def sequences_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def sequences_per_optimizer_step(self) -> int:
        return self.sequences_per_step // self.optimizer_steps_per_batch

    @property
    def max_tokens_per_sequence(self) -> int:
        """Return the tokens of the longest sequence, or 0 where nothing bounds it."""
        return (
            self.max_prompt_tokens + self.max_completion_tokens if self.max_completion_tokens else 0
        )

    @property
    def max_micro_batches(self) -> int:
        """Return the micro-batches of a shard and optimizer step of longest sequences.

        The number is 0 where nothing bounds them.
        """
        if not self.max_tokens_per_micro_batch or not self.max_tokens_per_sequence:
            return 0
        per_shard = ceil_div(self.sequences_per_optimizer_step, self.num_shards)
        per_micro_batch = self.max_tokens_per_micro_batch // self.max_tokens_per_sequence
        return ceil_div(per_shard, per_micro_batch)

    @property
    def steps_per_epoch(self) -> float | None:
        return None if self.num_rows is None else self.num_rows / self.prompts_per_step

    def plain(self) -> dict[str, Any]:
        """Return every number, also those that follow from others, as JSON has them."""
        derived = (
            "sequences_per_step",
            "sequences_per_optimizer_step",
            "max_tokens_per_sequence",
            "max_micro_batches",
            "steps_per_epoch",
        )
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def render(self) -> str:
        """Return one line per fact, for the console and the log."""
        return render(self)


def make_plan(
    config: RunConfig,
    num_rows: int | None,
    plugins: Plugins,
    needs: frozenset[str] | None = None,
    job: Job = Job.TRAIN,
) -> Plan:
    """Work out the plan of ``config``.

    No backend is imported. Reading options here does not count as using them.

    Args:
        num_rows: prompts, or rows of supervised training. None where they are not
            loaded.
        needs: what the algorithm needs, where it exists already. Without it the backend
            of the algorithm declares that.

    Raises:
        ConfigError: options contradict each other. The message says which values nearby
            do not.
        PluginError: no transport moves weights from this engine to this rollout.
    """
    config = with_steps(original(config), num_rows)
    trains, samples = job is Job.TRAIN, does_sample(config, job)
    if needs is None:
        declared = plugins.get("algorithm", config.algorithm.name).capabilities_of(config.algorithm)
        needs = frozenset(c.removeprefix(NEEDS) for c in declared if c.startswith(NEEDS))

    workers = make_workers(config, needs, plugins, rollouts=samples)
    has_critic = trains and VALUES in needs
    engines, steps = trained_engines(config, has_critic), optimizer_steps(config, has_critic)
    path = weight_path(config, plugins) if samples else ("", "")
    apart = trains and evaluates_apart(config)
    eval_path = weight_path(as_evaluated(config), plugins) if apart else ("", "")

    plan = Plan(
        job=job,
        steps=config.steps,
        prompts_per_step=config.prompts_per_step,
        samples_per_prompt=config.samples_per_prompt if trains else 1,
        optimizer_steps_per_batch=config.optimizer_steps_per_batch,
        epochs_per_batch=config.epochs_per_batch,
        optimizer_steps=steps["policy"],
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_completion_tokens=_completion_tokens(config) if trains else 0,
        max_rows_per_episode=_rows_per_episode(config),
        renderer=described(config.environment.renderer) if config.environment else "",
        max_tokens_per_micro_batch=config.engine.micro_batch_limit[1]
        * config.engine.ranks_per_sequence,
        rates={r: e.rate for r, e in engines.items() if e.rate and steps[r]},
        max_staleness=config.max_staleness,
        in_flight=on_sync(config, plugins) if trains else InFlight.DRAIN,
        num_rows=None if config.data.sampler else num_rows,
        num_shards=max(config.engine.ranks // config.engine.ranks_per_shard, 1),
        executor=config.executor,
        placement=config.ray.placement if config.executor is ExecutorName.RAY else None,
        workers=workers,
        roles=tuple(_described(role, config) for role in workers),
        weights=_ways(config, path, eval_path),
        weight_path=path,
        eval_weight_path=eval_path,
        own_reference=is_own_reference(config, plugins),
        offload=_offload(config, plugins),
        trackers=tuple(config.trackers),
        run_dir=config.run_dir,
    )

    check(plan, config, plugins)
    check_columns(config, plugins, needs, job)
    check_teacher(config, plugins, needs, job)
    return plan


def with_steps(config: RunConfig, num_rows: int | None) -> RunConfig:
    """Return the configuration with the steps that ``epochs`` amounts to, if it is set.

    Args:
        num_rows: None where they are not loaded. The run is then taken for a long one.
    """
    if not config.epochs:
        return config
    # 1.1 * 100 is 110.00000000000001 to a computer, and 110 rows to a user.
    rows = ceil(round(config.epochs * (num_rows or UNKNOWN), 6))
    steps = ceil_div(rows, config.prompts_per_step)
    return replace(config, steps=max(steps, 1))


def trained_engines(config: RunConfig, has_critic: bool) -> dict[str, EngineConfig]:
    """Return the configurations of the engines that train, by role.

    Each is made for as many optimizer steps as its role takes.

    Raises:
        ConfigError: a configuration does not fit into that number.
    """
    engines = {}
    for role, number in optimizer_steps(config, has_critic).items():
        path = "engine" if role == "policy" else f"{role}.engine"
        try:
            engines[role] = section(config, path).for_run(number)
        except ValueError as error:
            raise ConfigError(in_full(str(error), path)) from None
    return engines


def on_sync(config: RunConfig, plugins: Plugins) -> InFlight:
    """Return what a sync does with requests that are being sampled.

    ``auto`` is resolved.
    """
    if config.sync.in_flight is not OnSync.AUTO:
        return InFlight(config.sync.in_flight)
    able = plugins.get("rollout", config.rollout.name).capabilities_of(config.rollout)
    return InFlight.RECOMPUTE if config.max_staleness and RECOMPUTES in able else InFlight.DRAIN


def _offload(config: RunConfig, plugins: Plugins) -> Offload:
    """Return the option, without AUTO where roles cannot take turns."""
    stays = config.offload is Offload.AUTO and no_turns(config, plugins)
    return Offload.FALSE if stays else config.offload


def is_own_reference(config: RunConfig, plugins: Plugins) -> bool:
    """Tell whether the policy can answer as it was before training.

    No other engine has to then.
    """
    backend = plugins.get("engine", config.engine.name)
    return "output:base_logprobs" in backend.capabilities_of(config.engine)


def make_workers(
    config: RunConfig, needs: frozenset[str], plugins: Plugins, *, rollouts: bool
) -> tuple[Role, ...]:
    """Return every role of a run, with its number of workers."""
    roles = [Role("policy", config.engine.ranks)]
    refers = "ref_logprobs" in needs and not is_own_reference(config, plugins)
    roles += [Role("reference", config.engine.ranks)] if refers else []
    roles += [Role("critic", config.critic.engine.ranks)] if VALUES in needs else []
    roles += [Role(role_of(n), config.teacher.engine.ranks) for n in teachers_of(config.teacher)]

    if rollouts and config.reward_model.model.path:
        roles.append(Role(REWARD_MODEL, config.reward_model.engine.ranks))
    if rollouts:
        roles.append(_replicas(ROLLOUT, config.rollout))
        roles += [_replicas(EVAL_ROLLOUT, config.eval.rollout)] if evaluates_apart(config) else []
        roles += [_replicas(JUDGE, config.judge.rollout)] if config.judge.model.path else []
    return tuple(roles)


def _replicas(role: str, rollout: RolloutConfig) -> Role:
    return Role(role, rollout.replicas, rollout.devices_per_replica)


def evaluates_apart(config: RunConfig) -> bool:
    """Tell whether training evaluates with a rollout of its own."""
    return config.eval.rollout is not None and does_evaluate(config, Job.TRAIN)


def as_evaluated(config: RunConfig) -> RunConfig:
    """Return the configuration with the rollout of evaluations as its rollout."""
    return replace(config, rollout=config.eval.rollout)


def _ways(config: RunConfig, path: tuple[str, str], eval_path: tuple[str, str]) -> str:
    """Describe the way of weights to each rollout."""
    way = _way(config, path)
    if not eval_path[1]:
        return way
    return f"{way}; evaluation: {_way(as_evaluated(config), eval_path)}"


def _way(config: RunConfig, path: tuple[str, str]) -> str:
    """Describe the way of weights, if there is one."""
    weight_format, transport = path
    if not transport:
        return ""
    return f"{config.engine.name} -> {transport} ({weight_format}) -> {config.rollout.name}"


def _described(role: Role, config: RunConfig) -> str:
    backend = _engine(config.engine)
    if role.name in ROLLOUTS:
        backend = section(config, SERVED_BY[role.name]).name
    elif role.name == REWARD_MODEL:
        backend = _engine(config.reward_model.engine)
    elif role.name.startswith(TEACHER):
        backend = _engine(config.teacher.engine)
    elif role.name == "critic":
        alone = config.critic.warmup_steps
        backend = _engine(config.critic.engine)
        backend += f", alone for the first {count(alone, 'step')}" if alone else ""

    return f"{role.name} ({backend})" + (f" x {role.count}" if role.count > 1 else "")


def _engine(config: EngineConfig) -> str:
    return f"engine {config.name}: {config.split}" if config.split else f"engine {config.name}"


def weight_path(config: RunConfig, plugins: Plugins) -> tuple[str, str]:
    """Return the format and the transport for weights of this engine and rollout.

    The plugins of both answer, those that bring transports, and core.

    Raises:
        PluginError: no transport moves weights from the engine to the rollout.
    """
    pair = ("engine", config.engine.name), ("rollout", config.rollout.name)
    engine, rollout = (plugins.get(*key) for key in pair)
    asked = [owner for key in pair if (owner := plugins.owner_of(*key))]
    named, transports = config.sync.transport, dict[str, Backend]()
    for name in plugins.declared("transport"):
        owner = plugins.owner_of("transport", name)
        # One that nobody selects is not offered: its plugin is not imported.
        if owner and (owner.is_core or owner in asked or name == named):
            transports[name] = plugins.get("transport", name)
            asked += [owner] if owner not in asked else []

    answers = plugins.answers(
        "coupler_weight_path",
        asked,
        engine=engine,
        rollout=rollout,
        transports=transports,
        config=config,
    )
    source, answer = next(answers)
    match answer:
        case (str() as weight_format, str() as transport) if transport in transports:
            return weight_format, transport
    raise PluginError(
        f"coupler_weight_path of {source} returned {answer!r:.60}, and has to return a format "
        f"and one of the transports {', '.join(transports)}.\n  try:  {source.fix}"
    )


def _rows_per_episode(config: RunConfig) -> int:
    settings = config.environment
    return settings.max_turns if settings and not settings.keep_reasoning else 1


def _completion_tokens(config: RunConfig) -> int:
    """Return the most tokens that can follow the longest prompt."""
    if config.environment:
        return episode_tokens(config) - config.data.max_prompt_tokens
    return config.sampling.max_tokens
