"""Register ``engine=fsdp`` and ``rollout=hf``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from coupler.plugins import Backend, Kind, hookimpl
from coupler_engine_fsdp.config import FSDPConfig, HFConfig

if TYPE_CHECKING:
    from coupler import RunConfig
    from coupler.plugins.finding import Finding

TESTED = {"torch": ">=2.11,<2.14", "transformers": ">=5.12,<5.18"}


def _of_engine(config: FSDPConfig) -> frozenset[str]:
    always = {
        "weights:full",
        "memory:offload",
        "output:values",
        "model:moe",
        "input:sampling_mask",
    }
    lora = {"output:base_logprobs", "weights:lora"} if config.lora_rank else set()
    return frozenset(always | lora)


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
    )


@hookimpl
def coupler_validate(config: RunConfig) -> Iterable[str]:
    for path, engine in (
        ("engine", config.engine),
        ("critic.engine", config.critic.engine),
        ("reward_model.engine", config.reward_model.engine),
    ):
        if not isinstance(engine, FSDPConfig):
            continue
        yield from engine.folder_problems(path)
        if engine.fsdp_size and engine.ranks % engine.fsdp_size:
            yield (
                f"{path}.fsdp_size={engine.fsdp_size} does not divide {path}.ranks={engine.ranks}: "
                "set it to a divisor, or to 0: all ranks share one copy."
            )


@hookimpl
def coupler_doctor() -> Iterable[Finding]:
    from coupler_engine_fsdp.doctor import kernels

    return kernels()
