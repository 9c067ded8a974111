"""What a configuration amounts to, before a device is taken: how many sequences, steps, tokens, and which roles.

One option of an engine's own is read by its name, where its config has it: ``max_tokens_per_gpu``, of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from coupler.config.options import SECTIONS, in_full, section
from coupler.config.reads import original
from coupler.config.schema import ExecutorName, Job, OnSync, Placement, RouterReplay, RunConfig
from coupler.data.prompts import Limit
from coupler.errors import ConfigError
from coupler.executors.placement import ROLLOUT, Role, make_shares
from coupler.interfaces import EngineConfig, InFlight
from coupler.loop.turns import optimizer_steps
from coupler.plugins.manager import Plugins

FREES_MEMORY = {"engine": "memory:offload", "rollout": "memory:sleep"}
ROUTES = "output:routed_experts"  # capability of an engine, and of a rollout
RECOMPUTES = "in_flight:recompute"  # capability of a rollout
VALUES = "values"  # column of a critic
NEEDS = "needs:"  # capability of an algorithm: a column that core adds, for example needs:ref_logprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers of a run. A sequence is one prompt with one completion."""

    job: Job
    steps: int
    prompts_per_step: int
    samples_per_prompt: int  # 1 in supervised training
    optimizer_steps_per_batch: int
    epochs_per_batch: int
    optimizer_steps: int  # of the policy, over the run
    max_prompt_tokens: int
    max_completion_tokens: int  # 0 in supervised training, where a row is as long as its text
    max_tokens_per_micro_batch: int  # 0: the engine has no such option
    rates: Mapping[str, str]  # how the learning rate of a trained role goes, where its engine says
    max_staleness: int
    in_flight: InFlight  # what a sync does with requests that are being sampled
    num_rows: int | None  # None: not known without loading the data
    num_shards: int  # data shards of the engine
    executor: ExecutorName
    placement: Placement | None  # None: everything in one process
    workers: tuple[Role, ...]
    roles: tuple[str, ...]  # "policy (engine toy)", "rollout (toy) x 2", ...
    weights: str  # how they get from engine to rollout; empty in supervised training
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
        """Of the longest sequence; 0 where nothing bounds it."""
        return self.max_prompt_tokens + self.max_completion_tokens if self.max_completion_tokens else 0

    @property
    def max_micro_batches(self) -> int:
        """Per shard and optimizer step if every sequence is as long as it can be; 0 where nothing says."""
        if not self.max_tokens_per_micro_batch or not self.max_tokens_per_sequence:
            return 0
        per_micro_batch = self.max_tokens_per_micro_batch // self.max_tokens_per_sequence
        return _ceil(_ceil(self.sequences_per_optimizer_step, self.num_shards), per_micro_batch)

    @property
    def steps_per_epoch(self) -> float | None:
        return None if self.num_rows is None else self.num_rows / self.prompts_per_step

    def plain(self) -> dict[str, Any]:
        """Every number of it, also those that follow from others, as JSON has them."""
        derived = (
            "sequences_per_step", "sequences_per_optimizer_step", "max_tokens_per_sequence", "max_micro_batches",
            "steps_per_epoch",
        )  # fmt: skip
        return {**asdict(self), **{name: getattr(self, name) for name in derived}}

    def render(self) -> str:
        """One line per fact, for the console and the log."""
        width = max(len(label) for label, _ in self._lines())
        return "\n".join(f"{label:{width}}  {text}" for label, text in self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        lines = [("step", self._step()), ("optimizer", self._optimizer())]
        if self.max_tokens_per_sequence:
            most = self.sequences_per_step * self.max_tokens_per_sequence
            prompt, completion = self.max_prompt_tokens, self.max_completion_tokens
            text = f"at most {prompt} + {completion} = {self.max_tokens_per_sequence} per sequence, {most} per step"
            lines.append(("tokens", text))
        if self.max_tokens_per_micro_batch:
            count = f"at most {self.max_micro_batches}" if self.max_micro_batches else "as many as it takes"
            lines.append(
                ("micro-batches", f"{count} per optimizer step, of at most {self.max_tokens_per_micro_batch} tokens")
            )
        lines.append(("run", self._run()))
        if self.rates:
            lines.append(("learning rate", "; ".join(f"{role} {rate}" for role, rate in self.rates.items())))
        if self.job is Job.TRAIN:
            behind = f"rollouts run at most {_count(self.max_staleness, 'version')} behind; "
            behind += f"what they sample during a sync: {self.in_flight}"
            lines.append(("staleness", behind if self.max_staleness else "0: sampling and training take turns"))
        lines.append(("layout", f"{_count(self.num_shards, 'data shard')}; {', '.join(self.roles)}"))
        lines.append(("executor", self._executor()))
        if self.weights:
            lines.append(("weights", self.weights))
        return [*lines, ("trackers", ", ".join(self.trackers) or "none"), ("folder", self.run_dir)]

    def _executor(self) -> str:
        if self.placement is None:
            return f"{self.executor}: one process"
        shares = make_shares(self.workers, self.placement)
        each = "; ".join(
            f"{' and '.join(r.name for r in s.roles)} on {_count(s.num_bundles, 'bundle')}" for s in shares
        )
        return f"{self.executor}: {_count(sum(r.count for r in self.workers), 'process')}, {self.placement}: {each}"

    def _step(self) -> str:
        if self.job is Job.SFT:
            return _count(self.prompts_per_step, "row")
        prompts, samples = _count(self.prompts_per_step, "prompt"), _count(self.samples_per_prompt, "sample")
        return f"{prompts} x {samples} = {_count(self.sequences_per_step, 'sequence')}"

    def _optimizer(self) -> str:
        number, epochs = self.optimizer_steps_per_batch * self.epochs_per_batch, self.epochs_per_batch
        each = _count(self.sequences_per_optimizer_step, "sequence")
        text = f"{_count(number, 'optimizer step')} of {each} per step"
        text += f", in {epochs} epochs" if epochs > 1 else ""
        if number == 1 or self.job is Job.SFT:
            return text
        return f"{text} ({'step 2 is' if number == 2 else f'steps 2-{number} are'} off-policy)"

    def _run(self) -> str:
        text = f"{_count(self.steps, 'step')} = {_count(self.optimizer_steps, 'optimizer step')}"
        if self.steps_per_epoch is not None:
            text += f"; {self.steps_per_epoch:.3g} steps per epoch, {self.steps / self.steps_per_epoch:.3g} epochs"
        return text


def make_plan(
    config: RunConfig,
    num_rows: int | None,
    plugins: Plugins,
    needs: frozenset[str] | None = None,
    job: Job = Job.TRAIN,
) -> Plan:
    """Work out what ``config`` amounts to. Imports no backend; reading options here does not count as using them.

    Args:
        num_rows: prompts, or rows of supervised training; None where they are not loaded.
        needs: the algorithm's, where it exists already; otherwise what its backend declares.

    Raises:
        ConfigError: options contradict each other; says which values nearby do not.
        PluginError: no transport moves weights from this engine to this rollout.
    """
    config = original(config)
    trains = job is Job.TRAIN
    if needs is None:
        declared = plugins.get("algorithm", config.algorithm.name).capabilities_of(config.algorithm)
        needs = frozenset(c.removeprefix(NEEDS) for c in declared if c.startswith(NEEDS))
    workers = make_workers(config, needs, plugins, rollouts=trains)
    has_critic = trains and VALUES in needs
    engines, steps = trained_engines(config, has_critic), optimizer_steps(config, has_critic)
    plan = Plan(
        job=job,
        steps=config.steps,
        prompts_per_step=config.prompts_per_step,
        samples_per_prompt=config.samples_per_prompt if trains else 1,
        optimizer_steps_per_batch=config.optimizer_steps_per_batch,
        epochs_per_batch=config.epochs_per_batch,
        optimizer_steps=steps["policy"],
        max_prompt_tokens=config.data.max_prompt_tokens,
        max_completion_tokens=config.sampling.max_tokens if trains else 0,
        max_tokens_per_micro_batch=_micro_batch_tokens(config.engine),
        rates={role: engine.rate for role, engine in engines.items() if engine.rate and steps[role]},
        max_staleness=config.max_staleness,
        in_flight=on_sync(config, plugins) if trains else InFlight.DRAIN,
        num_rows=num_rows,
        num_shards=max(config.engine.ranks // config.engine.ranks_per_shard, 1),
        executor=config.executor,
        placement=config.ray.placement if config.executor is ExecutorName.RAY else None,
        workers=workers,
        roles=tuple(_described(role, config) for role in workers),
        weights=_weights(config, plugins) if trains else "",
        trackers=tuple(config.trackers),
        run_dir=config.run_dir,
    )
    _check(plan, config, plugins)
    _check_routes(config, plugins, needs, job)
    return plan


def trained_engines(config: RunConfig, has_critic: bool) -> dict[str, EngineConfig]:
    """The configurations of the engines that train, by role, each for as many optimizer steps as it takes.

    Raises:
        ConfigError: one does not fit into that.
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
    """What a sync does with requests that are being sampled, ``auto`` resolved."""
    if config.sync.in_flight is not OnSync.AUTO:
        return InFlight(config.sync.in_flight)
    able = plugins.get("rollout", config.rollout.name).capabilities_of(config.rollout)
    return InFlight.RECOMPUTE if config.max_staleness and RECOMPUTES in able else InFlight.DRAIN


def is_own_reference(config: RunConfig, plugins: Plugins) -> bool:
    """Whether the policy can answer as it was before training, so that no other engine has to."""
    return "output:base_logprobs" in plugins.get("engine", config.engine.name).capabilities_of(config.engine)


def make_workers(config: RunConfig, needs: frozenset[str], plugins: Plugins, *, rollouts: bool) -> tuple[Role, ...]:
    """Every role of a run, with its number of workers."""
    roles = [Role("policy", config.engine.ranks)]
    refers = "ref_logprobs" in needs and not is_own_reference(config, plugins)
    roles += [Role("reference", config.engine.ranks)] if refers else []
    roles += [Role("critic", config.critic.engine.ranks)] if VALUES in needs else []
    if rollouts:
        roles.append(Role(ROLLOUT, config.rollout.replicas, config.rollout.devices_per_replica))
    return tuple(roles)


def _described(role: Role, config: RunConfig) -> str:
    backend = _engine(config.engine)
    if role.name == ROLLOUT:
        backend = config.rollout.name
    elif role.name == "critic":
        alone = config.critic.warmup_steps
        backend = _engine(config.critic.engine)
        backend += f", alone for the first {_count(alone, 'step')}" if alone else ""
    return f"{role.name} ({backend})" + (f" x {role.count}" if role.count > 1 else "")


def _engine(config: EngineConfig) -> str:
    return f"engine {config.name}: {config.split}" if config.split else f"engine {config.name}"


def _weights(config: RunConfig, plugins: Plugins) -> str:
    fmt, transport = weight_path(config, plugins)
    return f"{config.engine.name} -> {transport} ({fmt}) -> {config.rollout.name}"


def weight_path(config: RunConfig, plugins: Plugins) -> tuple[str, str]:
    """Format and transport of this pair. Its plugins answer, those that bring transports, and core.

    Raises:
        PluginError: there is no way.
    """
    transports = plugins.of("transport")
    pair = ("engine", config.engine.name), ("rollout", config.rollout.name)
    asked = [plugins.owner[key] for key in (*pair, *(("transport", name) for name in transports))]
    engine, rollout = (plugins.get(*key) for key in pair)
    return plugins.call(
        "coupler_weight_path", asked, engine=engine, rollout=rollout, transports=transports, config=config
    )


def _check(plan: Plan, config: RunConfig, plugins: Plugins) -> None:
    sequences, number = plan.sequences_per_step, plan.optimizer_steps_per_batch
    critic = config.critic.optimizer_steps_per_batch
    if critic and sequences % critic:
        raise ConfigError(
            f"critic.optimizer_steps_per_batch={critic} does not divide the {sequences} sequences of a step.\n"
            f"  try:  critic.optimizer_steps_per_batch=0, which is as many as the policy's {number}"
        )
    if sequences % number:
        divisors = [d for d in range(1, sequences + 1) if sequences % d == 0]
        near = sorted(sorted(divisors, key=lambda d: abs(d - number))[:2])
        prompts = sorted(_nearest_multiples(plan.prompts_per_step, _step_of(number, plan.samples_per_prompt)))
        raise ConfigError(
            f"optimizer_steps_per_batch={number} does not divide the {sequences} sequences of a step.\n"
            f"  try:  optimizer_steps_per_batch={_either(near)}, or prompts_per_step={_either(prompts)}"
        )
    longest = plan.max_tokens_per_sequence
    for path in (path for path, kind in SECTIONS.items() if kind == "engine" and section(config, path)):
        engine = section(config, path)
        room = micro_batch_room(engine, path)
        if room and longest > room.tokens:
            raise ConfigError(
                f"{room.name} is less than one sequence can have: "
                f"data.max_prompt_tokens + sampling.max_tokens = {longest}.\n"
                f"  try:  {room.fix.format(_ceil(longest, room.ranks))}"
            )
        if engine.ranks > 1 and "world:1" in plugins.get("engine", engine.name).capabilities_of(engine):
            raise ConfigError(f"{path}={engine.name} runs on one rank.\n  try:  {path}.ranks=1, or another engine")
    if config.offload and plan.job is Job.TRAIN:
        for path, kind in SECTIONS.items():
            wanted, inner = FREES_MEMORY.get(kind), section(config, path)
            if wanted and inner and wanted not in plugins.get(kind, inner.name).capabilities_of(inner):
                raise ConfigError(
                    f"offload=true needs {path}={inner.name} to free device memory, which it cannot ({wanted}).\n"
                    f"  try:  offload=false, or another {path}"
                )


def _check_routes(config: RunConfig, plugins: Plugins, needs: frozenset[str], job: Job) -> None:
    """Refuse a replay of routes that nobody records, or that nobody can replay."""
    mode = config.router_replay
    if mode is RouterReplay.DISABLED:
        return
    for path in ("engine", *(["rollout"] if mode is RouterReplay.R3 and job is Job.TRAIN else [])):
        inner = section(config, path)
        if ROUTES not in plugins.get(path, inner.name).capabilities_of(inner):
            raise ConfigError(
                f"router_replay={mode} needs {path}={inner.name} to say which experts tokens go to, which it does not "
                f"({ROUTES}).\n  try:  router_replay=disabled, or another {path}"
            )
    if job is not Job.TRAIN:
        raise ConfigError(f"router_replay={mode} is of training on samples.\n  try:  router_replay=disabled")
    one_step = config.optimizer_steps_per_batch * config.epochs_per_batch == 1
    if mode is RouterReplay.R2 and (one_step or "old_logprobs" not in needs):
        raise ConfigError(
            "router_replay=R2 records routes in the pass for old log-probs, and there is none: it takes "
            "optimizer_steps_per_batch or epochs_per_batch above 1 and an algorithm that needs old_logprobs.\n"
            "  try:  router_replay=disabled: one step trains with the weights that would be recorded"
        )


def micro_batch_room(engine: EngineConfig, path: str) -> Limit | None:
    """How long a sequence may be for the engine of the section ``path``; None where it has no such option."""
    engine = original(engine)
    tokens, ranks, option = _micro_batch_tokens(engine), engine.ranks_per_sequence, f"{path}.max_tokens_per_gpu="
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    return Limit(tokens, f"{option}{tokens // ranks}{each}", f"{option}{{}}", ranks) if tokens else None


def _micro_batch_tokens(engine: Any) -> int:
    """Of the ranks that share each sequence together."""
    known = "max_tokens_per_gpu" in {f.name for f in fields(engine)}
    return engine.max_tokens_per_gpu * engine.ranks_per_sequence if known else 0


def _step_of(number: int, samples: int) -> int:
    """The smallest number of prompts whose samples ``number`` divides."""
    return next(p for p in range(1, number + 1) if p * samples % number == 0)


def _nearest_multiples(value: int, step: int) -> set[int]:
    return {max(value // step, 1) * step, _ceil(value, step) * step}


def _either(values: list[int]) -> str:
    return " or ".join(map(str, values))


def _ceil(value: int, by: int) -> int:
    return -(-value // by)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"
