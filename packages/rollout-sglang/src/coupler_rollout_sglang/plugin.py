"""Register ``rollout=sglang``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from coupler import RunConfig
from coupler.plugins import Backend, Kind, hookimpl
from coupler_rollout_sglang.config import SGLangConfig

if TYPE_CHECKING:
    from coupler.plugins.finding import Finding

# Tests ran with 0.5.23 on the CPU.
RANGE = ">=0.5.17,<0.5.24"


def _capabilities(config: SGLangConfig) -> frozenset[str]:
    pauses = {"in_flight:abort", "in_flight:recompute", "in_flight:stale_kv"}
    always = {
        "weights:full",
        "workers:remote",
        "sampling:top_p",
        "output:sampling_mask",
        *pauses,
    }

    chosen = {
        "memory:sleep": config.sleep_mode,
        # A server that runs already has the weights that it was started with.
        "model:own_weights": not config.server,
        "output:routed_experts": config.routed_experts,
        "weights:lora": config.max_lora_rank > 0,
        "model:moe": config.max_lora_rank == 0,
    }
    return frozenset(always | {name for name, on in chosen.items() if on})


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    yield Backend(
        kind=Kind.ROLLOUT,
        name="sglang",
        target="coupler_rollout_sglang.rollout:SGLangRollout",
        config=SGLangConfig,
        capabilities=_capabilities,
        tested={"sglang": RANGE},
        serves="python -m sglang.launch_server --model-path {folder}",
    )


@hookimpl
def coupler_validate(config: RunConfig) -> Iterable[str]:
    """Refuse what would make two runs differ."""
    if not isinstance(config.rollout, SGLangConfig):
        return
    if config.deterministic and not config.rollout.per_request_seeds:
        yield (
            "deterministic=true needs rollout.per_request_seeds=true, else equal requests "
            "give other tokens."
        )


@hookimpl
def coupler_doctor(config: RunConfig | None) -> Iterable[Finding]:
    """Check SGLang's kernels, cuDNN and attention, if the run has this rollout."""
    if config is None or not isinstance(config.rollout, SGLangConfig):
        return []
    from coupler_rollout_sglang.doctor import findings

    return findings(config.rollout)
