"""``coupler train``: reinforcement learning."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from coupler.batch import Batch
from coupler.batch.columns import ROUTED_EXPERTS
from coupler.config.checks import does_evaluate
from coupler.config.compose import Composed
from coupler.config.schema import Job, RouterReplay, RunConfig
from coupler.data import PromptStream, fingerprint
from coupler.interfaces import Output
from coupler.jobs.build import Builder
from coupler.jobs.device_sharing import hold_state, hold_trained, share_devices, start
from coupler.jobs.preflight import place, report_unread
from coupler.loop.buffer import Buffer
from coupler.loop.device_memory import GENERATING, Held, Residency
from coupler.loop.engine_group import EngineGroup
from coupler.loop.evaluator import Evaluator
from coupler.loop.sampler import Sampler
from coupler.loop.trainer import Provider, Trainer
from coupler.loop.turns import OLD_LOGPROBS, warmup_steps
from coupler.metrics import Metrics, merge
from coupler.plugins.manager import Plugins
from coupler.rewards import RewardPool
from coupler.run.plan import VALUES, make_plan
from coupler.run.run_folder import Journal
from coupler.run.run_lock import claimed
from coupler.run.saving import Saving, due
from coupler.run.step_record import Recorder
from coupler.system.garbage import heap_set_aside
from coupler.system.log import PLAIN, get_logger

log = get_logger(__name__)

REFERENCE = "ref_logprobs"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # how config.json counts them, by family
LOGPROBS, ROUTES = Output("logprobs"), Output("routed_experts")


def train(composed: Composed, plugins: Plugins) -> dict[str, float]:
    """Train the policy; return the values of the last step."""
    with claimed(Path(composed.config.run_dir)):
        return asyncio.run(_train(Builder(composed, plugins)))


async def _train(builder: Builder) -> dict[str, float]:
    config, algorithm, session = builder.config, builder.algorithm, builder.session()
    found = session.previous()
    done = found.step if found else 0
    if session.is_complete(done):
        return {}
    prompts = builder.prompts(config.data, "data")
    data = fingerprint(prompt.row for prompt in prompts)
    held_out = builder.prompts(config.eval.data, "eval.data") if does_evaluate(config, Job.TRAIN) else []
    judge = builder.critic_model() if VALUES in algorithm.needs else None
    plan = make_plan(config, len(prompts), builder.plugins, algorithm.needs)
    log.info(plan.render(), extra=PLAIN)
    if warning := unreplayed(config, Path(builder.model.path)):
        log.warning(warning)
    with session.running(data, found, plan) as (journal, rewards):
        await place(builder, plan.workers)
        policy, rollouts = builder.engine("policy", trains=True), builder.rollouts()
        refers = REFERENCE in algorithm.needs and not plan.own_reference
        reference = builder.engine("reference", trains=False) if refers else None
        critic = builder.critic(judge) if judge else None
        residency = share_devices(config, policy, rollouts, reference, critic)
        scorer = builder.scorer(rollouts, rewards)
        weights = builder.weight_sync(
            policy, rollouts, prompts[0], residency, path=plan.weight_path, in_flight=plan.in_flight
        )
        await start(residency, weights, policy, reference, critic)
        max_rejected = config.max_rejected_factor * config.prompts_per_step
        buffer = Buffer(config.prompts_per_step, config.max_staleness, max_rejected)
        sampler = Sampler(
            config.sampling,
            config.samples_per_prompt,
            config.seed,
            prompts=PromptStream(prompts, config.seed, config.data.shuffle),
            scorer=scorer,
            algorithm=algorithm,
            buffer=buffer,
            in_waves=config.deterministic,
            routed_experts=config.router_replay is RouterReplay.R3,
        )
        trained = {group.spec.role: group for group in (policy, critic) if group}
        async with session.checkpoints(data) as checkpoints:
            evaluator = builder.evaluator(scorer, held_out) if held_out else None
            steps = _Steps(builder, journal, critic, evaluator, rewards, residency, done)
            trainer = Trainer(
                config,
                policy=policy,
                critic=critic,
                weights=weights,
                algorithm=algorithm,
                sampler=sampler,
                buffer=buffer,
                providers=column_providers(config, policy, reference, critic, residency),
                residency=residency,
                record=Recorder(journal.run_dir / "record", config.record.every_steps).write,
            )
            if found:
                await session.restore(found, trained, trainer, data, partial(hold_trained, residency))
            saving = Saving(config, checkpoints, trained, trainer, steps.after, partial(hold_state, residency))
            with heap_set_aside():
                await trainer.fit(saving.after, done)
        for role, group in reversed(trained.items()) if config.checkpoint.export else ():  # the policy's says: complete
            async with hold_state(residency, role):
                await session.export(group)
        return steps.last


@dataclass
class _Steps:
    """What happens after each step: evaluation, tracking, and the look for keys that nobody read."""

    builder: Builder
    journal: Journal
    critic: EngineGroup | None
    evaluator: Evaluator | None
    rewards: RewardPool
    residency: Residency
    done: int  # steps of this run that another process took
    last: dict[str, float] = field(default_factory=dict)

    async def after(self, step: int, metrics: Metrics) -> dict[str, float]:
        config = self.builder.config
        metrics = merge([metrics, self.rewards.metrics()])
        if not config.deterministic:  # what a process holds is the system's to say, and no run repeats it
            metrics |= self.residency.metrics()
        if self.evaluator and self.evaluates(step):
            async with self.residency("eval", GENERATING):
                evaluated, scored = await self.evaluator.run()
            self.journal.write_samples(f"eval_{step}.jsonl", scored, self.builder.codec.decode)
            metrics |= evaluated
        self.last = self.journal.log(step, metrics)
        warm = warmup_steps(config, bool(self.critic))
        if step == min(1 + max(self.done, warm), config.steps):  # by then every role has trained in this process
            await report_unread(self.builder, read_later=("checkpoint.",))
        return self.last

    def evaluates(self, step: int) -> bool:
        """At the start if that is wanted, every so often, and then after the last step too."""
        config = self.builder.config
        if step == 0:
            return config.eval.at_start
        return due(config.eval.every_steps, step) or (step == config.steps and config.eval.every_steps > 0)


def unreplayed(config: RunConfig, folder: Path) -> str:
    """Why this run should replay routes, where its model has experts and it does not; else nothing."""
    file = folder / "config.json"
    if config.router_replay is not RouterReplay.DISABLED or not file.is_file():
        return ""
    facts = json.loads(file.read_text())
    count = max((facts.get(name) or 0 for name in EXPERTS), default=0)
    if count < 2:
        return ""
    return (
        f"the model has {count} experts a layer, and engine and rollout need not send a token to the same ones.\n"
        "  try:  router_replay=R3, or R2 with several optimizer steps per batch; see train_infer/kl"
    )


def column_providers(
    config: RunConfig,
    policy: EngineGroup,
    reference: EngineGroup | None,
    critic: EngineGroup | None,
    residency: Residency,
) -> dict[str, Provider]:
    """Name who computes which column; :meth:`Trainer.complete` asks for those it needs."""

    def forward_of(role: str, group: EngineGroup, replays: bool = False, **columns: Output) -> Provider:
        async def provide(batch: Batch) -> dict[str, np.ndarray]:
            async with residency(role, {role: frozenset({Held.PARAMS})}):
                done = await group.forward(batch if replays else batch.without(ROUTED_EXPERTS), (*columns.values(),))
                return {name: done[output.name] for name, output in columns.items()}

        return provide

    providers: dict[str, Provider] = {}
    recorded = {ROUTED_EXPERTS: ROUTES} if config.router_replay is RouterReplay.R2 else {}
    providers[OLD_LOGPROBS] = forward_of("policy", policy, replays=True, old_logprobs=LOGPROBS, **recorded)
    providers[REFERENCE] = (
        forward_of("reference", reference, ref_logprobs=LOGPROBS)
        if reference
        else forward_of("policy", policy, ref_logprobs=Output("base_logprobs"))
    )
    if critic:
        providers[VALUES] = forward_of("critic", critic, values=Output("values"))
    return providers
