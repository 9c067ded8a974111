"""Register ``engine=fsdp`` and ``rollout=hf``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from coupler.plugins import Backend, Kind, hookimpl
from coupler_engine_fsdp.config import FSDPConfig, HFConfig
from coupler_engine_fsdp.layout import problems, read_heads

if TYPE_CHECKING:
    from coupler import RunConfig
    from coupler.plugins.finding import Finding

TESTED = {"torch": ">=2.11,<2.16", "transformers": ">=5.12,<5.25"}


def _of_engine(config: FSDPConfig) -> frozenset[str]:
    always = {
        "weights:full",
        "memory:offload",
        "output:values",
        "output:sum_pi_squared",
        "output:topk",
        "model:moe",
        "lora:experts",
        "input:sampling_mask",
    }

    lora = {"output:base_logprobs"} if config.lora_rank else set()
    # Rollouts run adapters of linear maps. They get experts with the updates added.
    apart = {"weights:lora"} if config.lora_rank and not config.adapts_experts else set()
    return frozenset(always | lora | apart)


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    yield Backend(
        kind=Kind.ENGINE,
        name="fsdp",
        target="coupler_engine_fsdp.engine:FSDPEngine",
        config=FSDPConfig,
        capabilities=_of_engine,
        tested=TESTED,
    )
    yield Backend(
        kind=Kind.ROLLOUT,
        name="hf",
        target="coupler_engine_fsdp.rollout:HFRollout",
        config=HFConfig,
        capabilities=frozenset(
            {
                "weights:full",
                "model:own_weights",
                "sampling:top_p",
                "output:sampling_mask",
                "memory:sleep",
                "in_flight:abort",
                "in_flight:recompute",
                "in_flight:stale_kv",
            }
        ),
        tested=TESTED,
        serves="transformers serve {folder}",
    )


@hookimpl
def coupler_validate(config: RunConfig) -> Iterable[str]:
    """Refuse sizes that do not fit the ranks, or a model that is there already."""
    policy = config.model.path
    teachers = list(config.teacher.models.values()) or [config.teacher.model.path or policy]

    for path, engine, folder in (
        ("engine", config.engine, policy),
        ("critic.engine", config.critic.engine, config.critic.model.path or policy),
        *(("teacher.engine", config.teacher.engine, teacher) for teacher in teachers),
        ("reward_model.engine", config.reward_model.engine, config.reward_model.model.path),
    ):
        if isinstance(engine, FSDPConfig):
            yield from engine.folder_problems(path)
            for what, fix in problems(engine, engine.ranks, read_heads(Path(folder)), path):
                yield f"{what}: {fix}."


@hookimpl
def coupler_doctor() -> Iterable[Finding]:
    from coupler_engine_fsdp.doctor import kernels

    return kernels()
