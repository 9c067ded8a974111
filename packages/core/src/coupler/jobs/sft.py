"""Fine-tune a model on answers, for ``coupler sft``."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coupler.config.checks import does_evaluate
from coupler.config.compose import Composed
from coupler.config.schema import Job
from coupler.data import fingerprint, prompt_stream
from coupler.errors import ConfigError
from coupler.jobs.build import Builder
from coupler.jobs.forms import form_of
from coupler.jobs.patience import Calendar, Patience
from coupler.jobs.preflight import check_spelling, import_classes, place, report_unread
from coupler.jobs.sft_data import Section, in_epochs
from coupler.jobs.sft_trainer import SupervisedTrainer
from coupler.jobs.train import REFERENCE, column_providers
from coupler.jobs.validation import Validation
from coupler.loop.device_memory import Residency
from coupler.loop.engine_group import EngineGroup
from coupler.metrics import Metric, Metrics
from coupler.plugins.manager import Plugins
from coupler.run.plan import Plan, make_plan
from coupler.run.run_folder import Journal
from coupler.run.run_lock import claimed
from coupler.run.saving import Saving
from coupler.system.garbage import heap_set_aside
from coupler.system.log import PLAIN, get_logger

log = get_logger(__name__)


def supervise(composed: Composed, plugins: Plugins) -> dict[str, float]:
    """Fine-tune the policy on the answers of ``data``.

    The values of the last step are returned.
    """
    check_spelling(composed, plugins, Job.SFT)
    with claimed(Path(composed.config.run_dir)):
        return asyncio.run(_supervise(Builder(composed, plugins)))


def _held_out(builder: Builder) -> list[Any]:
    """Return the examples of ``eval.data``, if the run measures them.

    Raises:
        ConfigError: rows of this form are not measured.
    """
    config = builder.config
    if not does_evaluate(config, Job.SFT):
        return []
    if not form_of(config, builder.plugins).validates:
        raise ConfigError(
            f"eval.data is measured in supervised training on answers, and "
            f"algorithm={config.algorithm.name} has rows of another form.\n"
            "  try:  eval.every_steps=0"
        )
    return Section(builder, config.eval.data, "eval.data").examples


async def _reference(builder: Builder, plan: Plan) -> EngineGroup | None:
    """Start the engine of the reference, if the algorithm compares with one."""
    if REFERENCE not in builder.algorithm.needs or plan.own_reference:
        return None
    reference = builder.reference()
    await reference.setup()
    return reference


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
    held_out = _held_out(builder)
    order = prompt_stream(examples, taught.kept, config.data, config.seed)
    plan = make_plan(config, len(examples), builder.plugins, algorithm.needs, Job.SFT)
    log.info(plan.render(), extra=PLAIN)

    import_classes(builder, Job.SFT)
    with session.recording(data, found, plan) as journal:
        await place(builder, plan.workers)
        policy = builder.engine("policy", trains=True)
        await policy.setup()
        reference = await _reference(builder, plan)

        validation = Validation(
            policy,
            algorithm,
            held_out,
            config.prompts_per_step,
        )
        calendar, patience = Calendar(config, len(examples)), Patience(config)
        steps = _Steps(
            builder,
            journal,
            validation,
            calendar,
            patience,
            done,
        )
        trained = {"policy": policy}
        async with session.checkpoints(data) as checkpoints:
            alone = Residency({}, shared=False)
            trainer = SupervisedTrainer(
                config,
                policy=policy,
                algorithm=algorithm,
                order=order,
                pack=form_of(config, builder.plugins).pack,
                providers=column_providers(config, policy, reference, None, alone),
                patience=patience,
            )
            if found:
                await session.restore(found, trained, trainer, data, nullcontext)
            elif calendar.evaluates(0):
                await steps.after(0, {})

            saving = Saving(
                config,
                checkpoints,
                trained,
                trainer,
                steps.after,
                nullcontext,
                steps.saves,
            )
            with heap_set_aside():
                await trainer.fit(saving.after, done)

        if config.checkpoint.export:
            await session.export(policy)
        return steps.last


@dataclass
class _Steps:
    """Evaluates and tracks after each step, and looks for keys that nobody read."""

    builder: Builder
    journal: Journal
    validation: Validation
    calendar: Calendar
    patience: Patience
    # Steps of this run that another process took.
    done: int
    last: dict[str, float] = field(default_factory=dict)

    async def after(self, step: int, metrics: Metrics) -> dict[str, float]:
        config = self.builder.config
        if not config.data.sampler:
            epochs = step * config.prompts_per_step / self.calendar.num_examples
            metrics = metrics | {"epochs": Metric(epochs, how="sum")}
        if self.calendar.evaluates(step):
            metrics = metrics | await self.validation.run()

        self.last = self.journal.log(step, metrics)
        self.patience.hear(self.last)
        if self.patience.over:
            log.info(
                f"training ends early after step {step}: {config.checkpoint.best_metric} was "
                f"best at {self.patience.best} and did not get better in "
                f"{self.patience.since} evaluations"
            )
        if step == self.done + 1:
            await report_unread(self.builder, read_later=("checkpoint.", "eval."))
        return self.last

    def saves(self, step: int) -> bool:
        return self.patience.over or self.calendar.saves(step)
