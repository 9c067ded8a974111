"""``coupler sft``: supervised fine-tuning."""

from __future__ import annotations

import asyncio

from coupler.config.compose import Composed
from coupler.config.schema import Job
from coupler.data import load_rows, supervised
from coupler.jobs.parts import Parts
from coupler.metrics import Metrics
from coupler.plan import make_plan
from coupler.plugins.manager import Plugins
from coupler.supervised import SupervisedTrainer


def supervise(composed: Composed, plugins: Plugins) -> dict[str, float]:
    """Fine-tune the policy on the answers of ``data``; return the values of the last step."""
    return asyncio.run(_supervise(Parts(composed, plugins)))


async def _supervise(parts: Parts) -> dict[str, float]:
    config, algorithm = parts.config, parts.algorithm()
    examples, dropped = supervised(load_rows(config.data), parts.codec, config.data)
    if dropped:
        print(f"data: dropped {dropped} prompts of more than {config.data.max_prompt_tokens} tokens")
    plan = make_plan(config, len(examples), parts.plugins, algorithm.needs, Job.SFT)
    print(plan.render())
    with parts.recording() as journal:
        await parts.place(plan.workers)
        policy = parts.engine("policy", trains=True)
        await policy.setup()
        last: dict[str, float] = {}

        async def on_step(step: int, metrics: Metrics) -> None:
            last.update(journal.log(step, metrics))
            if step == 1:
                await parts.report_unread()

        await SupervisedTrainer(config, policy=policy, algorithm=algorithm, examples=examples, on_step=on_step).fit()
        await parts.finish(policy, journal, config.steps)
        return last
