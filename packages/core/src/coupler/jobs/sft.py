"""Fine-tune a model on answers, for ``coupler sft``."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path

from coupler.config.compose import Composed
from coupler.config.schema import Job
from coupler.data import fingerprint, load_rows, prompt_stream
from coupler.jobs.build import Builder
from coupler.jobs.forms import form_of
from coupler.jobs.preflight import check_spelling, import_classes, place, report_unread
from coupler.jobs.sft_trainer import SupervisedTrainer
from coupler.jobs.train import REFERENCE, column_providers
from coupler.loop.device_memory import Residency
from coupler.metrics import Metrics
from coupler.plugins.manager import Plugins
from coupler.run.plan import make_plan
from coupler.run.plan_checks import micro_batch_room
from coupler.run.row_form import columns_of
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


async def _supervise(builder: Builder) -> dict[str, float]:
    config, algorithm, session = builder.config, builder.algorithm, builder.session()
    found = session.previous()
    done = found.step if found else 0
    if session.is_complete(done):
        return {}

    form = form_of(config, builder.plugins)
    rows = load_rows(config.data, columns=columns_of(config, builder.plugins))
    data = fingerprint(rows)
    room = micro_batch_room(config.engine, "engine")
    kept, dropped = form.encode(rows, builder.codec, config.data, room)
    if dropped:
        log.info(f"data: dropped {dropped} rows that are too long", extra=PLAIN)
    taught, trajectories = zip(*kept, strict=True)
    order = prompt_stream(trajectories, taught, config.data, config.seed)
    plan = make_plan(config, len(kept), builder.plugins, algorithm.needs, Job.SFT)
    log.info(plan.render(), extra=PLAIN)

    import_classes(builder, Job.SFT)
    with session.recording(data, found, plan) as journal:
        await place(builder, plan.workers)
        policy = builder.engine("policy", trains=True)
        await policy.setup()
        reference = None
        if REFERENCE in algorithm.needs and not plan.own_reference:
            reference = builder.reference()
            await reference.setup()
        last: dict[str, float] = {}

        async def track(step: int, metrics: Metrics) -> dict[str, float]:
            last.update(journal.log(step, metrics))
            if step == done + 1:
                await report_unread(builder, read_later=("checkpoint.",))
            return last

        trained = {"policy": policy}
        async with session.checkpoints(data) as checkpoints:
            alone = Residency({}, shared=False)
            trainer = SupervisedTrainer(
                config,
                policy=policy,
                algorithm=algorithm,
                order=order,
                pack=form.pack,
                providers=column_providers(config, policy, reference, None, alone),
            )
            if found:
                await session.restore(found, trained, trainer, data, nullcontext)

            saving = Saving(config, checkpoints, trained, trainer, track, nullcontext)
            with heap_set_aside():
                await trainer.fit(saving.after, done)

        if config.checkpoint.export:
            await session.export(policy)
        return last
