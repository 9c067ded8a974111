"""Sample held-out prompts once and score them, for ``coupler eval``."""

from __future__ import annotations

import asyncio
from pathlib import Path

from coupler.config.compose import Composed
from coupler.config.schema import Job
from coupler.data import fingerprint
from coupler.errors import ConfigError
from coupler.jobs.build import Builder
from coupler.jobs.device_sharing import share_devices, start
from coupler.jobs.opinions import find_models, make_opinions
from coupler.jobs.preflight import check_spelling, import_classes, place, report_unread
from coupler.loop.device_memory import GENERATING
from coupler.loop.sync_answer import answer_of
from coupler.plugins.manager import Plugins
from coupler.rewards import Scoring
from coupler.run.opinion_checks import check_opinions
from coupler.run.plan import make_workers, on_sync, weight_path
from coupler.run.resume import is_started
from coupler.run.run_lock import claimed
from coupler.run.session import Session


def evaluate(composed: Composed, plugins: Plugins) -> dict[str, float]:
    """Score the model of ``model.path`` on ``eval.data``, and return the values."""
    check_spelling(composed, plugins, Job.EVAL)
    with claimed(Path(composed.config.run_dir)):
        return asyncio.run(_evaluate(Builder(composed, plugins)))


async def _evaluate(builder: Builder) -> dict[str, float]:
    config, plugins, session = builder.config, builder.plugins, builder.session()
    if config.eval.rollout:
        raise ConfigError(
            f"eval.rollout={config.eval.rollout.name} is of coupler train: here rollout samples.\n"
            f"  try:  rollout={config.eval.rollout.name}, and no eval.rollout"
        )
    if is_started(Path(config.run_dir)):
        raise ConfigError(
            f"run_dir={config.run_dir} holds a run already; nothing in it was touched.\n"
            "  try:  another run_dir"
        )
    check_opinions(config, plugins, Job.EVAL)

    with session.scoring() as pool:
        return await _sampled(builder, session, pool)


async def _sampled(builder: Builder, session: Session, pool: Scoring) -> dict[str, float]:
    config, plugins = builder.config, builder.plugins
    prompts = builder.prompts(config.eval.data, "eval.data")
    asked = find_models(builder, [("eval.data", prompts)])

    import_classes(builder, Job.EVAL)
    pool.start()
    with session.recording(fingerprint(prompt.row for prompt in prompts)) as journal:
        await place(builder, make_workers(config, frozenset(), plugins, rollouts=True))

        engine, rollouts = builder.engine("policy", trains=False), builder.rollouts()
        opinions = make_opinions(builder, asked, pool)
        residency = share_devices(config, None, rollouts, engine, opinions=opinions)
        path, in_flight = weight_path(config, plugins), on_sync(config, plugins)
        weights = builder.weight_sync(
            engine, rollouts, prompts[0], residency, path=path, in_flight=in_flight
        )
        await start(residency, weights, engine, opinions=opinions)
        await answer_of(weights, "prove")

        scorer = builder.scorer(rollouts, opinions.rewards)
        async with builder.environment_set_up(), residency("eval", GENERATING):
            metrics, scored = await builder.evaluator(scorer, prompts).run()

        journal.write_samples("eval.jsonl", scored, builder.codec.decode)
        await report_unread(builder)
        return journal.log(0, {**metrics, **opinions.rewards.metrics()})
