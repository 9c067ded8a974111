"""``coupler eval``: sample held-out prompts once and score them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from coupler.config.compose import Composed
from coupler.data import fingerprint
from coupler.errors import ConfigError
from coupler.jobs.build import Parts
from coupler.jobs.device_sharing import share_devices, start
from coupler.loop.device_memory import GENERATING
from coupler.plugins.manager import Plugins
from coupler.run.plan import make_workers
from coupler.run.run_lock import claimed


def evaluate(composed: Composed, plugins: Plugins) -> dict[str, float]:
    """Score the model of ``model.path`` on ``eval.data``; return the values."""
    with claimed(Path(composed.config.run_dir)):
        return asyncio.run(_evaluate(Parts(composed, plugins)))


async def _evaluate(parts: Parts) -> dict[str, float]:
    prompts = parts.prompts(parts.config.eval.data, "eval.data")
    if (Path(parts.config.run_dir) / "config.yaml").exists():
        raise ConfigError(
            f"run_dir={parts.config.run_dir} holds a run already; nothing in it was touched.\n  try:  another run_dir"
        )
    with parts.running(fingerprint(prompt.row for prompt in prompts)) as (journal, rewards):
        await parts.place(make_workers(parts.config, frozenset(), parts.plugins, rollouts=True))
        engine, rollouts = parts.engine("policy", trains=False), parts.rollouts()
        residency = share_devices(parts.config, engine, rollouts)
        weights = parts.edge(engine, rollouts, prompts[0], residency)
        await start(residency, weights, engine)
        await weights.prove()
        async with residency("eval", GENERATING):
            metrics, scored = await parts.evaluator(parts.scorer(rollouts, rewards), prompts).run()
        journal.write_samples("eval.jsonl", scored, parts.codec.decode)
        await parts.report_unread()
        return journal.log(0, {**metrics, **rewards.metrics()})
