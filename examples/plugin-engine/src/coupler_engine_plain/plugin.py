"""Declare what Coupler reads when it lists plugins: imports the standard library and
coupler only.
"""

from dataclasses import dataclass

from coupler import Backend, hookimpl
from coupler.engine_kit.adamw import AdamWConfig


@dataclass
class PlainConfig(AdamWConfig):
    name: str = "plain"
    max_tokens_per_gpu: int = 4096  # Tokens of one micro-batch, padding left out.


@hookimpl
def coupler_backends():
    yield Backend(
        kind="engine",
        name="plain",
        target="coupler_engine_plain.engine:PlainEngine",
        config=PlainConfig,
        capabilities=frozenset({"weights:full", "world:1"}),
    )
