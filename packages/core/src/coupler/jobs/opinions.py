"""Build the models that are asked about finished episodes, and start them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from coupler.batch import Batch
from coupler.data import Codec, Prompt, Row
from coupler.data.model_folder import model_folder
from coupler.executors.placement import JUDGE, REWARD_MODEL
from coupler.interfaces import Head, Model, Output
from coupler.jobs.build import Builder
from coupler.jobs.judging import JudgeReplicas
from coupler.loop.engine_group import EngineGroup
from coupler.loop.rollout_group import RolloutGroup
from coupler.rewards import Scoring
from coupler.rewards.classifier import check_classifier
from coupler.rewards.functions import check_sources
from coupler.rewards.judge import Judge, Question
from coupler.rewards.opinions import Rewards, refuse_columns
from coupler.rewards.options import RewardConfig, ScorerModelConfig, opinions_of
from coupler.rewards.reward_model import RewardModel
from coupler.run.plan_checks import micro_batch_room
from coupler.system.log import get_logger
from coupler.worker.replica import RolloutSpec

log = get_logger(__name__)

VALUES = Output("values")


@dataclass
class Opinions:
    """The rewards of a run, and the workers of the models that they ask."""

    rewards: Rewards
    reward_model: EngineGroup | None = None
    judge: RolloutGroup | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The folders of the models to ask, checked, with their tokenizers loaded."""

    classifier: tuple[Model, Codec, int | None] | None
    judge: tuple[Model, Codec, Question] | None
    columns: frozenset[str] = frozenset()  # of all rows


def find_models(builder: Builder, prompts: Sequence[tuple[str, Sequence[Prompt]]]) -> Found:
    """Check the folders of all models that are asked, before a worker starts.

    Args:
        prompts: those of each section of data, by its key.

    Raises:
        CouplerError: a folder does not hold what is asked for, or a row has a column
            of what a model says.
    """
    config = builder.config
    said = opinions_of(config.reward_model, config.judge)
    for key, rows in prompts:
        refuse_columns(rows, said, key)
    every = [(key, prompt.row) for key, rows in prompts for prompt in rows]
    _check_sources(config.reward, every)
    extra = frozenset().union(*(row.extra for _, row in every))
    columns = extra | {"index", "prompt", "answer", *said} if every else frozenset[str]()

    classifier = None
    if config.reward_model.model.path:
        model = replace(_model(config.reward_model.model, "reward_model.model"), head=Head.VALUE)
        padding = check_classifier(Path(model.path)).get("pad_token_id")
        classifier = (model, Codec(model), padding)

    judge = None
    if config.judge.model.path:
        model = replace(_model(config.judge.model, "judge.model"), own_weights=True)
        judge = (model, Codec(model), Question.of(config.judge))
    return Found(classifier, judge, columns)


def _check_sources(config: RewardConfig, rows: Sequence[tuple[str, Row]]) -> None:
    """Refuse a row that no reward function scores, and name sources that no row has.

    Raises:
        ConfigError: there is such a row.
    """
    sources: dict[str, str] = {}
    for key, row in rows:
        sources.setdefault(row.data_source, row.place(key))
    if absent := check_sources(config, sources):
        log.warning(f"no row has the data_source of {', '.join(absent)}")


def _model(config: ScorerModelConfig, key: str) -> Model:
    return Model(model_folder(config.path, key), config.trust_remote_code)


def make_opinions(builder: Builder, found: Found, pool: Scoring) -> Opinions:
    """Make what scores episodes, with the models that were found.

    Nothing heavy is loaded.
    """
    if found.columns:
        pool.check_columns(found.columns)
    made = Opinions(Rewards(pool))

    if found.classifier:
        engine = builder.config.reward_model.engine
        made.reward_model = builder.frozen(REWARD_MODEL, engine, found.classifier[0])
        made.rewards.models["score"] = _scoring(builder, made.reward_model, *found.classifier[1:])
    if found.judge:
        made.judge = _replicas(builder, found.judge[0])
        made.rewards.models["verdict"] = _judging(builder, made.judge, *found.judge[1:])
    return made


def _replicas(builder: Builder, model: Model) -> RolloutGroup:
    rollout = builder.config.judge.rollout
    target = builder.plugins.get("rollout", rollout.name).target
    spec = RolloutSpec(target, rollout, model)
    return RolloutGroup(builder.executor, spec, builder.ranks(JUDGE, rollout.replicas), JUDGE)


def _judging(builder: Builder, rollouts: RolloutGroup, codec: Codec, question: Question) -> Judge:
    config = builder.config
    limits = (config.judge.rollout.sequence_limit[1], codec.max_positions)

    return Judge(
        codec,
        JudgeReplicas(rollouts).generate,
        question,
        config.judge,
        room=min((limit for limit in limits if limit), default=2**31),
        seed=config.seed,
        alone=config.deterministic,
    )


def _scoring(
    builder: Builder, engine: EngineGroup, codec: Codec, padding: int | None
) -> RewardModel:
    async def forward(batch: Batch) -> np.ndarray:
        return (await engine.forward(batch, (VALUES,)))["values"]

    # One token more follows the conversation.
    limits = []
    if room := micro_batch_room(builder.config.reward_model.engine, "reward_model.engine"):
        limits.append((room.tokens - 1, room.name))
    if codec.max_positions:
        limits.append((codec.max_positions - 1, "max_position_embeddings of its config.json"))
    room = min(limits, default=(2**31, "none"))
    return RewardModel(codec, forward, room, padding, alone=builder.config.deterministic)
