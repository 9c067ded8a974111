"""Train a policy by reinforcement learning, for ``coupler train``."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import DEMONSTRATION, ROUTED_EXPERTS
from coupler.batch.trajectory import Trajectory
from coupler.config.compose import Composed
from coupler.config.schema import Job, RouterReplay, RunConfig
from coupler.conversation.packing import GREEDY
from coupler.data import PromptStream, Row, fingerprint, prompt_stream
from coupler.interfaces import Algorithm, Model, Output, Request
from coupler.jobs.build import Builder
from coupler.jobs.demonstrations import DemonstratingScorer, find_answers
from coupler.jobs.device_sharing import (
    hold_state,
    hold_trained,
    parts_of,
    share_devices,
    start,
)
from coupler.jobs.evaluation import Evaluation, make_evaluation
from coupler.jobs.greedy import GreedyScorer
from coupler.jobs.opinions import Opinions, find_models, make_opinions
from coupler.jobs.preflight import check_spelling, import_classes, place, report_unread
from coupler.jobs.teacher import find_teachers, make_teachers
from coupler.jobs.teaching import find_prompts, make_teaching
from coupler.loop.buffer import Buffer
from coupler.loop.completing import Provider
from coupler.loop.device_memory import Held, Residency
from coupler.loop.engine_group import EngineGroup
from coupler.loop.sampler import Sampler, Scorer
from coupler.loop.trainer import Trainer
from coupler.loop.turns import OLD_LOGPROBS, warmup_steps
from coupler.metrics import Metrics, merge
from coupler.plugins.manager import Plugins
from coupler.rewards import Scoring
from coupler.run.checkpoint import Checkpoint
from coupler.run.learning import LearningWatch
from coupler.run.plan import VALUES, Plan, make_plan
from coupler.run.plan_checks import SQUARES
from coupler.run.run_folder import Journal
from coupler.run.run_lock import claimed
from coupler.run.samples import FOLDER, SampleWriter
from coupler.run.sampling_check import SamplingCheck
from coupler.run.saving import Saving, due
from coupler.run.session import Session
from coupler.run.step_record import Recorder
from coupler.run.throughput import Throughput
from coupler.system.files import read_json
from coupler.system.garbage import heap_set_aside
from coupler.system.log import PLAIN, get_logger

log = get_logger(__name__)

REFERENCE = "ref_logprobs"
# Keys of config.json that count the experts of a layer, by family of models.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
LOGPROBS, ROUTES = Output("logprobs"), Output("routed_experts")


def train(composed: Composed, plugins: Plugins) -> dict[str, float]:
    """Train the policy, and return the values of the last step."""
    check_spelling(composed, plugins, Job.TRAIN)
    with claimed(Path(composed.config.run_dir)):
        return asyncio.run(_train(Builder(composed, plugins)))


def _announce(plan: Plan, config: RunConfig, folder: Path) -> Throughput:
    log.info(plan.render(), extra=PLAIN)
    if warning := unreplayed(config, folder):
        log.warning(warning)
    return Throughput.of_run(config, plan, folder)


def _engines(
    builder: Builder, plan: Plan, critic: Model | None
) -> tuple[EngineGroup, EngineGroup | None, EngineGroup | None]:
    """Make the engines of policy, reference and critic, as far as they are needed."""
    builder.settle_recompute(plan)
    refers = REFERENCE in builder.algorithm.needs and not plan.own_reference

    return (
        builder.engine("policy", trains=True),
        builder.reference() if refers else None,
        builder.critic(critic) if critic else None,
    )


def _sampler(
    config: RunConfig,
    algorithm: Algorithm,
    prompts: PromptStream,
    scorer: Scorer,
    answers: Mapping[int, Trajectory],
) -> Sampler:
    """Build what fills a buffer of its own with scored groups."""
    max_rejected = config.max_rejected_factor * config.prompts_per_step
    buffer = Buffer(config.prompts_per_step, config.max_staleness, max_rejected)
    sampling = config.sampling
    scorer = GreedyScorer(scorer) if GREEDY in algorithm.needs else scorer
    if DEMONSTRATION in algorithm.needs:
        scorer = DemonstratingScorer(scorer, algorithm, answers)

    request = Request(
        (),
        sampling.max_tokens,
        sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        routed_experts=config.router_replay is RouterReplay.R3,
    )

    return Sampler(
        request,
        config.samples_per_prompt,
        config.seed,
        prompts=prompts,
        scorer=scorer,
        algorithm=algorithm,
        buffer=buffer,
        in_waves=config.deterministic,
    )


@dataclass
class _Kept:
    """Keeps each step: its batch for replays, and its samples as text. The count of its
    arithmetic and whether the run learns come of the same batch.
    """

    journal: Journal
    recorder: Recorder
    samples: SampleWriter
    speed: Throughput
    watch: LearningWatch

    @classmethod
    def of_run(
        cls, builder: Builder, run: str, rows: Sequence[Row], journal: Journal, speed: Throughput
    ) -> _Kept:
        config, run_dir = builder.config, Path(builder.config.run_dir)

        recorder = Recorder(run_dir / "record", config.record.every_steps, run)
        samples = SampleWriter(
            run_dir / FOLDER,
            config.samples.every_steps,
            config.samples.max_groups,
            builder.codec.tokenizer.decode,
            {row.index: row.data_source for row in rows if "data_source" in row.extra},
        )
        samples.forget_after(journal.done)
        watch = LearningWatch(config.sampling.max_tokens, samples.lines)
        return cls(journal, recorder, samples, speed, watch)

    def keep(self, step: int, batch: Batch, trained: Metrics) -> None:
        self.recorder.write(step, batch, trained)
        if lines := self.samples.write(step, batch):
            self.journal.show(step, lines)
        self.speed.saw(batch)
        self.watch.batch = batch


async def _train(builder: Builder) -> dict[str, float]:
    session = builder.session()
    found = session.previous()
    if session.is_complete(found.step if found else 0):
        return {}

    with session.scoring() as pool:
        builder.read_rows()
        return await _trained(builder, session, found, pool)


async def _trained(
    builder: Builder, session: Session, found: Checkpoint | None, pool: Scoring
) -> dict[str, float]:
    config, algorithm, done = builder.config, builder.algorithm, found.step if found else 0
    prompts = builder.prompts(config.data, "data")
    rows, held_out = [prompt.row for prompt in prompts], builder.held_out()
    data, stream = fingerprint(rows), prompt_stream(prompts, rows, config.data, config.seed)
    critic_model = builder.critic_model() if VALUES in algorithm.needs else None
    taught_by, shown = find_teachers(builder, prompts), find_prompts(builder, prompts)
    answers = find_answers(builder, prompts)
    asked = find_models(builder, (("data", prompts), ("eval.data", held_out)))

    plan = make_plan(config, len(prompts), builder.plugins, algorithm.needs)
    speed = _announce(plan, config, Path(builder.model.path))
    import_classes(builder, Job.TRAIN)
    pool.start()
    with session.recording(data, found, plan) as journal:
        await place(builder, plan.workers)
        rollouts = builder.rollouts()
        engines = policy, _, critic = _engines(builder, plan, critic_model)
        teachers = make_teachers(builder, taught_by)
        opinions = make_opinions(builder, asked, pool)
        roles = *engines, *teachers.values()
        residency = share_devices(builder.config, plan, rollouts, *roles, opinions=opinions)
        scorer = builder.scorer(rollouts, opinions.rewards)
        weights = builder.weight_sync(
            policy, rollouts, prompts[0], residency, path=plan.weight_path, in_flight=plan.in_flight
        )
        evaluation = make_evaluation(builder, plan, policy, held_out, scorer, residency)
        await start(residency, weights, *roles, opinions=opinions, plan=plan)
        if evaluation:
            await evaluation.start()

        sampler = _sampler(config, algorithm, stream, scorer, answers)
        providers = column_providers(config, *engines, residency, algorithm.needs)
        providers |= make_teaching(builder, policy, teachers, prompts, shown, residency)
        trained = {group.spec.role: group for group in (policy, critic) if group}
        async with session.checkpoints(data) as checkpoints, builder.environment_set_up():
            kept = _Kept.of_run(builder, session.run, rows, journal, speed)
            steps = _Steps(builder, journal, evaluation, opinions, residency, kept, done)
            trainer = Trainer(
                config,
                policy=policy,
                critic=critic,
                weights=weights,
                algorithm=algorithm,
                sampler=sampler,
                buffer=sampler.buffer,
                providers=providers,
                residency=residency,
                record=kept.keep,
                judge=SamplingCheck(config.sync.max_sampling_z).judge,
                parts=parts_of(config, plan, residency),
            )
            hold, hold_all = partial(hold_state, residency), partial(hold_trained, residency)
            if found:
                await session.restore(found, trained, trainer, data, hold_all)

            saving = Saving(config, checkpoints, trained, trainer, steps.after, hold)
            with heap_set_aside():
                await trainer.fit(saving.after, done)

        # The policy's export comes last, since it says that the run is complete.
        for role, group in reversed(trained.items()) if config.checkpoint.export else ():
            async with hold_state(residency, role):
                await session.export(group)
        session.conclude()
        return steps.last


@dataclass
class _Steps:
    """Evaluates and tracks after each step, and looks for keys that nobody read."""

    builder: Builder
    journal: Journal
    evaluation: Evaluation | None
    opinions: Opinions
    residency: Residency
    kept: _Kept
    # Steps of this run that another process took.
    done: int
    last: dict[str, float] = field(default_factory=dict)

    async def after(self, step: int, metrics: Metrics) -> dict[str, float]:
        config = self.builder.config
        if self.evaluation and self.evaluates(step):
            evaluated, scored = await self.evaluation.run(step)
            self.journal.write_samples(
                f"eval_{step}.jsonl",
                scored,
                self.builder.codec.decode,
            )
            metrics = metrics | evaluated

        # Its calls of the reward count here, so that no checkpoint has to hold them.
        metrics = merge([metrics, self.opinions.rewards.metrics()]) | self.kept.speed.metrics(
            metrics
        )
        # The memory that a process holds differs from run to run.
        if not config.deterministic:
            metrics |= self.residency.metrics()

        self.last = self.journal.log(step, metrics)
        if learns_nothing := self.kept.watch.judge(step, self.last):
            log.warning(learns_nothing)
        # By this step every role has trained in this process.
        warm = warmup_steps(config, VALUES in self.builder.algorithm.needs)
        if step == min(1 + max(self.done, warm), config.steps):
            await report_unread(self.builder, read_later=("checkpoint.",))
        return self.last

    def evaluates(self, step: int) -> bool:
        """Tell whether the evaluation is due after ``step``.

        It is at the start if that is wanted, and every so many steps. A run that
        evaluates so also does after its last step.
        """
        config = self.builder.config
        if step == 0:
            return config.eval.at_start
        every = config.eval.every_steps
        return due(every, step) or (every > 0 and step == config.steps)


def unreplayed(config: RunConfig, folder: Path) -> str:
    """Return why this run should replay routes.

    The text is empty where the model has no experts, and where the run replays.
    """
    file = folder / "config.json"
    if config.router_replay is not RouterReplay.DISABLED or not file.is_file():
        return ""

    facts = read_json(file)
    count = max((facts.get(name) or 0 for name in EXPERTS), default=0)
    if count < 2:
        return ""

    return (
        f"the model has {count} experts a layer, and engine and rollout need not send a token "
        "to the same ones.\n"
        "  try:  router_replay=R3, or R2 with several optimizer steps per batch; see train_infer/kl"
    )


def column_providers(
    config: RunConfig,
    policy: EngineGroup,
    reference: EngineGroup | None,
    critic: EngineGroup | None,
    residency: Residency,
    needs: frozenset[str] = frozenset(),
) -> dict[str, Provider]:
    """Return the provider of each column.

    :meth:`Trainer.complete` asks for those that it needs. One pass gives old log-probs
    and, where ``needs`` has them, sums of squared probabilities.
    """

    def forward_of(
        role: str, group: EngineGroup, replays: bool = False, **columns: Output
    ) -> Provider:
        async def provide(batch: Batch) -> dict[str, np.ndarray]:
            if not replays:
                batch = batch.without(ROUTED_EXPERTS)
            async with residency(role, {role: frozenset({Held.PARAMS})}):
                done = await group.forward(batch, (*columns.values(),))
                return {name: done[output.name] for name, output in columns.items()}

        return provide

    providers: dict[str, Provider] = {}
    recorded = {ROUTED_EXPERTS: ROUTES} if config.router_replay is RouterReplay.R2 else {}
    squares = {SQUARES: Output(SQUARES)} if SQUARES in needs else {}
    providers[SQUARES if squares else OLD_LOGPROBS] = forward_of(
        "policy", policy, replays=True, old_logprobs=LOGPROBS, **squares, **recorded
    )
    providers[REFERENCE] = (
        forward_of("reference", reference, ref_logprobs=LOGPROBS)
        if reference
        else forward_of("policy", policy, ref_logprobs=Output("base_logprobs"))
    )
    if critic:
        providers[VALUES] = forward_of("critic", critic, values=Output("values"))
    return providers
