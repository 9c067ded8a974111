"""Evaluate on held-out rows while supervised training goes on: the loss on their
answers, and what the policy itself answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from coupler.config.checks import does_evaluate, does_sample
from coupler.config.schema import Job
from coupler.data import Example, Prompt, Row, encode_prompts
from coupler.errors import ConfigError
from coupler.interfaces import InFlight
from coupler.jobs.build import Builder
from coupler.jobs.device_sharing import NOBODY, share_devices, start
from coupler.jobs.evaluation import Evaluation
from coupler.jobs.forms import form_of
from coupler.jobs.opinions import Found, Opinions, find_models, make_opinions
from coupler.jobs.sft_data import Section
from coupler.jobs.validation import Validation
from coupler.loop.engine_group import EngineGroup
from coupler.metrics import Metrics
from coupler.rewards import Scoring
from coupler.run.checkpoint import Checkpoint
from coupler.run.plan import Plan
from coupler.run.row_form import SCORES, capabilities
from coupler.run.run_folder import Journal
from coupler.run.session import Session
from coupler.system.log import PLAIN, get_logger

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The rows of ``eval.data``, ready to be measured.

    Attributes:
        examples: rows whose loss is measured.
        prompts: those that the policy answers. Empty where nothing is sampled.
        models: the models that score answers.
    """

    examples: list[Example]
    prompts: list[Prompt]
    models: Found | None = None

    @classmethod
    def of(cls, builder: Builder) -> HeldOut:
        """Load what the run evaluates on, which may be nothing.

        Raises:
            ConfigError: rows of this form are not measured.
        """
        config = builder.config
        if not does_evaluate(config, Job.SFT):
            return cls([], [])
        section = Section(builder, config.eval.data, "eval.data")
        measured = form_of(config, builder.plugins).validates
        samples = does_sample(config, Job.SFT)

        if not measured and (not samples or SCORES in capabilities(config, builder.plugins)):
            raise ConfigError(
                f"eval.data is measured in supervised training on answers, and "
                f"algorithm={config.algorithm.name} has rows of another form.\n"
                "  try:  eval.every_steps=0, or for a policy a rollout and a reward.target, which "
                "score what it answers"
            )
        examples = section.examples if measured else []
        if not samples:
            return cls(examples, [])

        rows = [question(row) for row in section.rows]
        prompts, dropped = encode_prompts(rows, builder.codec, config.eval.data, "eval.data")
        if dropped:
            log.info(f"eval.data: dropped {dropped} prompts that are too long", extra=PLAIN)
        return cls(examples, prompts, find_models(builder, [("eval.data", prompts)]))

    @contextmanager
    def recording(
        self, session: Session, data: str, found: Checkpoint | None, plan: Plan
    ) -> Iterator[tuple[Journal, Scoring | None]]:
        """Open the run's folder, with the reward processes where answers are scored."""
        if self.models:
            with session.scoring() as pool:
                pool.start()
                with session.recording(data, found, plan) as journal:
                    yield journal, pool
        else:
            with session.recording(data, found, plan) as journal:
                yield journal, None


def question(row: Row) -> Row:
    """Return a row whose prompt ends where the policy speaks.

    A conversation ends before its last answer, which is the answer of the row.
    """
    if not row.is_conversation or isinstance(row.prompt, str):
        return row
    said = [message["role"] == "assistant" for message in row.prompt]
    last = len(said) - 1 - said[::-1].index(True)
    answer = str(row.prompt[last].get("content") or "")
    return replace(row, prompt=row.prompt[:last], answer=answer)


class SupervisedEvaluation:
    """Measures a policy on held-out rows, with the weights that it has.

    Attributes:
        residency: of all roles of the run.
    """

    def __init__(
        self,
        builder: Builder,
        plan: Plan,
        held_out: HeldOut,
        pool: Scoring | None,
        policy: EngineGroup,
        reference: EngineGroup | None,
    ) -> None:
        """Make the rollouts and models that answers need."""
        config = builder.config
        self.engines, self.decode = (policy, reference), builder.codec.decode
        self.opinions: Opinions | None = None
        if pool and held_out.models:
            self.opinions = make_opinions(builder, held_out.models, pool)

        rollouts = builder.rollouts() if self.opinions else None
        asked = self.opinions or NOBODY
        self.residency = share_devices(config, plan, rollouts, policy, reference, opinions=asked)
        self.validation = Validation(
            policy,
            builder.algorithm,
            held_out.examples,
            config.prompts_per_step,
            self.residency,
        )
        self.sampled = None
        if rollouts and self.opinions:
            weights = builder.weight_sync(
                policy,
                rollouts,
                held_out.prompts[0],
                self.residency,
                path=plan.weight_path,
                in_flight=InFlight.DRAIN,
            )
            scorer = builder.scorer(rollouts, self.opinions.rewards)
            evaluator = builder.evaluator(scorer, held_out.prompts)
            self.sampled = Evaluation(evaluator, self.residency, weights)

    async def start(self) -> None:
        """Start all roles of the run."""
        weights = self.sampled.weights if self.sampled else None
        await start(self.residency, weights, *self.engines, opinions=self.opinions or NOBODY)

    async def run(self, step: int, journal: Journal) -> Metrics:
        """Return the metrics after ``step``, and write down the scored answers."""
        found = await self.validation.run() if self.validation.examples else {}
        if not self.sampled or not self.opinions:
            return found
        evaluated, scored = await self.sampled.run(step)
        journal.write_samples(f"eval_{step}.jsonl", scored, self.decode)
        return found | evaluated | self.opinions.rewards.metrics()
