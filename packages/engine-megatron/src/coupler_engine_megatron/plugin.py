"""Register ``engine=megatron``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from coupler.plugins import Backend, Kind, hookimpl
from coupler_engine_megatron.config import MegatronConfig
from coupler_engine_megatron.layout import experts_of, problems, read_shape

if TYPE_CHECKING:
    from coupler import RunConfig
    from coupler.plugins.finding import Finding


def _capabilities(config: MegatronConfig) -> frozenset[str]:
    always = {
        "weights:full",
        "memory:offload",
        "output:values",
        "output:routed_experts",
        "output:sum_pi_squared",
        "input:sampling_mask",
        "model:moe",
        "lora:experts",
    }

    lora = {"output:base_logprobs"} if config.lora_rank else set()
    # Rollouts run adapters of linear maps. They get experts with the updates added.
    apart = {"weights:lora"} if config.lora_rank and not config.adapts_experts else set()
    return frozenset(always | lora | apart)


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    yield Backend(
        kind=Kind.ENGINE,
        name="megatron",
        target="coupler_engine_megatron.engine:MegatronEngine",
        config=MegatronConfig,
        capabilities=_capabilities,
        tested={
            "megatron-core": ">=0.16.1,<0.17",
            "mbridge": ">=0.15.1,<0.16",
            "torch": ">=2.11,<2.14",
            "transformers": ">=5.12,<5.25",
            # Checked only if it is installed.
            "transformer-engine": ">=2.9,<2.12",
        },
    )


@hookimpl
def coupler_validate(config: RunConfig) -> Iterable[str]:
    """Refuse parallel sizes that do not fit the ranks, or a model that is there
    already.
    """
    critic = config.critic.model.path or config.model.path
    scorer = config.reward_model.model.path

    for path, engine, folder in (
        ("engine", config.engine, config.model.path),
        ("critic.engine", config.critic.engine, critic),
        ("reward_model.engine", config.reward_model.engine, scorer),
    ):
        if isinstance(engine, MegatronConfig):
            yield from engine.folder_problems(path)
            for what, fix in problems(engine, engine.ranks, read_shape(Path(folder)), path):
                yield f"{what}: set {fix}."
    shape = read_shape(Path(config.model.path))
    replays = isinstance(config.engine, MegatronConfig) and config.router_replay != "disabled"
    if replays and shape is not None and not experts_of(shape):
        yield (
            f"router_replay={config.router_replay} needs a model with experts: set "
            "router_replay=disabled."
        )


@hookimpl
def coupler_doctor(config: RunConfig | None) -> Iterable[Finding]:
    """Say what is replaced on the CPU, if the run has this engine.

    Only an import of Megatron-Core can tell.
    """
    if config is None or not any(
        isinstance(e, MegatronConfig)
        for e in (config.engine, config.critic.engine, config.reward_model.engine)
    ):
        return []
    from coupler_engine_megatron.doctor import stand_ins

    return stand_ins()
