"""Declare the algorithms of this distribution, and judge their configurations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from coupler.plugins import Backend, Kind, hookimpl
from coupler_algos import preference_checks, source_checks, validate
from coupler_algos.config import GRPOConfig, PolicyConfig, PPOConfig, RLOOConfig, SFTConfig
from coupler_algos.preference_config import (
    DPOConfig,
    KTOConfig,
    OnlineDPOConfig,
    RewardModelConfig,
)

if TYPE_CHECKING:
    from coupler import RunConfig

TESTED = {"torch": ">=2.11,<2.14"}


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    yield Backend(
        kind=Kind.ALGORITHM,
        name="grpo",
        target="coupler_algos.grpo:GRPO",
        config=GRPOConfig,
        capabilities=_capabilities,
        tested=TESTED,
    )
    yield Backend(
        kind=Kind.ALGORITHM,
        name="rloo",
        target="coupler_algos.rloo:RLOO",
        config=RLOOConfig,
        capabilities=_capabilities,
        tested=TESTED,
    )
    yield Backend(
        kind=Kind.ALGORITHM,
        name="ppo",
        target="coupler_algos.ppo:PPO",
        config=PPOConfig,
        capabilities=_capabilities,
        tested=TESTED,
    )
    yield Backend(
        kind=Kind.ALGORITHM,
        name="sft",
        target="coupler_algos.sft:SFT",
        config=SFTConfig,
        capabilities=frozenset({"job:sft"}),
        tested=TESTED,
    )
    yield from _of_preferences()


def _of_preferences() -> Iterable[Backend]:
    yield Backend(
        kind=Kind.ALGORITHM,
        name="dpo",
        target="coupler_algos.preferences:DPO",
        config=DPOConfig,
        capabilities=_of_pairs,
        tested=TESTED,
    )

    yield Backend(
        kind=Kind.ALGORITHM,
        name="online_dpo",
        target="coupler_algos.preferences:OnlineDPO",
        config=OnlineDPOConfig,
        capabilities=_of_samples,
        tested=TESTED,
    )

    yield Backend(
        kind=Kind.ALGORITHM,
        name="kto",
        target="coupler_algos.preferences:KTO",
        config=KTOConfig,
        capabilities=frozenset(
            {"job:sft", "rows:label", "needs:ref_logprobs", "needs:old_logprobs"}
        ),
        tested=TESTED,
    )

    yield Backend(
        kind=Kind.ALGORITHM,
        name="reward_model",
        target="coupler_algos.preferences:RewardModel",
        config=RewardModelConfig,
        capabilities=frozenset({"job:sft", "rows:pair", "head:score"}),
        tested=TESTED,
    )


@hookimpl
def coupler_config_paths() -> Iterable[str]:
    return ["coupler_algos.conf"]


@hookimpl
def coupler_validate(config: RunConfig) -> Iterable[str]:
    return [
        *validate.problems(config),
        *source_checks.problems(config),
        *preference_checks.problems(config),
    ]


def _capabilities(config: PolicyConfig) -> frozenset[str]:
    return frozenset({"job:train", *(f"needs:{column}" for column in config.needs)})


def _of_pairs(config: DPOConfig) -> frozenset[str]:
    return frozenset({"job:sft", "rows:pair", *(f"needs:{column}" for column in config.needs)})


def _of_samples(config: OnlineDPOConfig) -> frozenset[str]:
    needs = {f"needs:{column}" for column in config.needs}
    return frozenset({"job:train", "rows:select", *needs})
