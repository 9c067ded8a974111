"""Declare the algorithms of this distribution, and judge their configurations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from coupler.plugins import Backend, Kind, hookimpl
from coupler_algos.config import GRPOConfig, PolicyConfig, PPOConfig, RLOOConfig, SFTConfig
from coupler_algos.validate import problems

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


@hookimpl
def coupler_config_paths() -> Iterable[str]:
    return ["coupler_algos.conf"]


@hookimpl
def coupler_validate(config: RunConfig) -> Iterable[str]:
    return list(problems(config))


def _capabilities(config: PolicyConfig) -> frozenset[str]:
    return frozenset({"job:train", *(f"needs:{column}" for column in config.needs)})
