"""Fine-tune a model on answers, for ``coupler sft``."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from coupler.config.compose import Composed
from coupler.config.schema import Job
from coupler.data import fingerprint, prompt_stream
from coupler.jobs.build import Builder
from coupler.jobs.device_sharing import hold_state, hold_trained
from coupler.jobs.forms import form_of
from coupler.jobs.patience import Calendar, Patience
from coupler.jobs.preflight import check_spelling, import_classes, place, report_unread
from coupler.jobs.sft_data import Section, in_epochs
from coupler.jobs.sft_evaluation import HeldOut, SupervisedEvaluation
from coupler.jobs.sft_trainer import SupervisedTrainer
from coupler.jobs.train import REFERENCE, column_providers
from coupler.loop.engine_group import EngineGroup
from coupler.metrics import Metric, Metrics
from coupler.plugins.manager import Plugins
from coupler.run.plan import Plan, make_plan
from coupler.run.run_folder import Journal
from coupler.run.run_lock import claimed
from coupler.run.saving import Saving
from coupler.run.throughput import Throughput
from coupler.system.garbage import heap_set_aside
from coupler.system.log import PLAIN, get_logger

log = get_logger(__name__)

# Keys whose reader may come after the first step.
READ_LATER = ("checkpoint.", "eval.", "sync.")


def supervise(composed: Composed, plugins: Plugins) -> dict[str, float]:
    """Fine-tune the policy on the answers of ``data``.

    The values of the last step are returned.
    """
    check_spelling(composed, plugins, Job.SFT)
    with claimed(Path(composed.config.run_dir)):
        return asyncio.run(_supervise(Builder(composed, plugins)))


def _reference(builder: Builder, plan: Plan) -> EngineGroup | None:
    """Make the engine of the reference, if the algorithm compares with one."""
    if REFERENCE not in builder.algorithm.needs or plan.own_reference:
        return None
    return builder.reference()


async def _supervise(builder: Builder) -> dict[str, float]:
    taught = Section(builder, builder.config.data, "data")
    if builder.config.epochs:
        builder = in_epochs(builder, taught)
    config, algorithm, session = builder.config, builder.algorithm, builder.session()
    found = session.previous()
    done = found.step if found else 0
    if session.is_complete(done):
        return {}

    data, examples = fingerprint(taught.rows), taught.examples
    held_out = HeldOut.of(builder)
    order = prompt_stream(examples, taught.kept, config.data, config.seed)
    plan = make_plan(config, len(examples), builder.plugins, algorithm.needs, Job.SFT)
    log.info(plan.render(), extra=PLAIN)
    builder.settle_recompute(plan)
    speed = Throughput.of_run(config, plan, Path(builder.model.path))
    pack = form_of(config, builder.plugins).pack

    import_classes(builder, Job.SFT)
    with held_out.recording(session, data, found, plan) as (journal, pool):
        await place(builder, plan.workers)
        policy, reference = builder.engine("policy", trains=True), _reference(builder, plan)
        evaluation = SupervisedEvaluation(builder, plan, held_out, pool, policy, reference)
        residency = evaluation.residency
        await evaluation.start()

        calendar, patience = Calendar(config, len(examples)), Patience(config)
        steps = _Steps(builder, journal, evaluation, calendar, patience, speed, done)
        providers = column_providers(config, policy, reference, None, residency, algorithm.needs)
        trained = {"policy": policy}
        async with session.checkpoints(data) as checkpoints:
            trainer = SupervisedTrainer(
                config,
                policy=policy,
                algorithm=algorithm,
                order=order,
                pack=lambda rows: speed.saw(pack(rows)),
                providers=providers,
                residency=residency,
                patience=patience,
            )
            if found:
                hold = partial(hold_trained, residency)
                await session.restore(found, trained, trainer, data, hold)
            elif calendar.evaluates(0):
                await steps.after(0, {})

            hold = partial(hold_state, residency)
            saving = Saving(
                config,
                checkpoints,
                trained,
                trainer,
                steps.after,
                hold,
                steps.saves,
            )
            with heap_set_aside():
                await trainer.fit(saving.after, done)

        if config.checkpoint.export:
            async with hold_state(residency, "policy"):
                await session.export(policy, steps.taken)
        session.conclude()
        return steps.last


@dataclass
class _Steps:
    """Evaluates and tracks after each step, and looks for keys that nobody read."""

    builder: Builder
    journal: Journal
    evaluation: SupervisedEvaluation
    calendar: Calendar
    patience: Patience
    speed: Throughput
    # Steps of this run that another process took.
    done: int
    last: dict[str, float] = field(default_factory=dict)
    # Steps of the run so far, which patience may end before the last.
    taken: int = field(init=False)

    def __post_init__(self) -> None:
        self.taken = self.done

    async def after(self, step: int, metrics: Metrics) -> dict[str, float]:
        config, self.taken = self.builder.config, step
        if not config.data.sampler:
            epochs = step * config.prompts_per_step / self.calendar.num_examples
            metrics = metrics | {"epochs": Metric(epochs, how="sum")}
        metrics = metrics | self.speed.metrics(metrics)
        if self.calendar.evaluates(step):
            metrics = metrics | await self.evaluation.run(step, self.journal)

        self.last = self.journal.log(step, metrics)
        self.patience.hear(self.last)
        if self.patience.over:
            log.info(
                f"training ends early after step {step}: {config.checkpoint.best_metric} was "
                f"best at {self.patience.best} and did not get better in "
                f"{self.patience.since} evaluations"
            )
        if step == self.done + 1:
            await report_unread(self.builder, read_later=READ_LATER)
        return self.last

    def saves(self, step: int) -> bool:
        return self.patience.over or self.calendar.saves(step)
