"""Declare what Coupler reads when it lists plugins: imports the standard library and
coupler only.
"""

from dataclasses import dataclass

from coupler import Backend, hookimpl


@dataclass
class PlainConfig:
    name: str = "plain"


@hookimpl
def coupler_backends():
    yield Backend(
        kind="sharding",
        name="plain",
        target="coupler_sharding_plain.manager:PlainManager",
        config=PlainConfig,
    )
