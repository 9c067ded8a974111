"""Entry point: ``engine=fsdp`` and ``rollout=hf``."""

from __future__ import annotations

from collections.abc import Iterable

from coupler.plugins import Backend, Kind, hookimpl
from coupler_engine_fsdp.config import FSDPConfig, HFConfig


@hookimpl
def coupler_backends() -> Iterable[Backend]:
    yield Backend(
        kind=Kind.ENGINE,
        name="fsdp",
        target="coupler_engine_fsdp.engine:FSDPEngine",
        config=FSDPConfig,
        capabilities=frozenset({"weights:full", "memory:offload", "output:values"}),
    )
    yield Backend(
        kind=Kind.ROLLOUT,
        name="hf",
        target="coupler_engine_fsdp.rollout:HFRollout",
        config=HFConfig,
        capabilities=frozenset(
            {"weights:full", "memory:sleep", "in_flight:abort", "in_flight:recompute", "in_flight:stale_kv"}
        ),
    )
